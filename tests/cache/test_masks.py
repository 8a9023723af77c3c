"""Masks of every shape and kind, in the first call and behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_kvq import KVQLayer

BATCH, HEADS, QUERIES, POSITIONS, PADDING = 2, 4, 5, 150, 30

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "positions": lambda mask: mask[1, 0, -1],
    "queries-positions": lambda mask: mask[1, 0],
    "1-1-1-positions": lambda mask: mask[1:, :1, -1:],
    "batch-1-1-positions": lambda mask: mask[:, :1, -1:],
    "batch-1-queries-positions": lambda mask: mask[:, :1],
    "1-heads-queries-positions": lambda mask: mask[1:],
    "batch-heads-queries-positions": lambda mask: mask,
}

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "bool": lambda mask: mask,
    "lowest": lambda mask: _additive(mask, torch.finfo(torch.float32).min),
    "infinite": lambda mask: _additive(mask, -torch.inf),
    "half": lambda mask: _additive(mask, torch.finfo(torch.float16).min).half(),
}


def _additive(mask: Tensor, masked: float) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, masked)


def allowed(shape: str) -> Tensor:
    """Keys that queries of the last positions see; rows of a batch differ in their left padding."""
    generator = torch.Generator().manual_seed(1)
    kept = torch.rand((BATCH, HEADS, QUERIES, POSITIONS), generator=generator) < 0.8
    kept[..., -1] = True
    position = torch.arange(POSITIONS)
    if shape.startswith("batch"):
        kept[0, ..., :PADDING] = False
        kept[0, ..., PADDING] = True
    causal = position <= position[-QUERIES:].unsqueeze(1)
    return SHAPES[shape](kept & causal if "queries" in shape else kept)


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("options", [{}, {"max_cache_len": 192}], ids=["grow", "static"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attend(shape: str, kind: str, options: dict[str, int], is_first: bool) -> None:
    key, value = torch.randn(2, BATCH, 2, POSITIONS, 32)
    query = torch.randn(BATCH, HEADS, QUERIES, 32)
    kept = allowed(shape)
    whole = kept.broadcast_to(BATCH, HEADS, QUERIES, POSITIONS)
    want = F.scaled_dot_product_attention(query, key, value, whole, enable_gqa=True)
    layer = KVQLayer(16, quantized_start=80, residual_length=10, **options)
    if not is_first:
        start = torch.zeros(BATCH, 1, 1, 1)
        start[0] = PADDING if shape.startswith("batch") else 0
        layer.update(key[:, :, :-QUERIES], value[:, :, :-QUERIES])
        layer.attend(query, (torch.arange(POSITIONS) >= start).expand(-1, 1, QUERIES, -1))
    layer.update(*(new if is_first else new[:, :, -QUERIES:] for new in (key, value)))
    out = layer.attend(query, KINDS[kind](kept))
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-3 if kind == "half" else 1e-5)


def test_padding_that_only_some_heads_mask_is_stored() -> None:
    layer = KVQLayer(4)
    layer.update(*torch.randn(2, 1, 2, 40, 32))
    mask = torch.ones(1, HEADS, 1, 40, dtype=torch.bool)
    mask[:, :3, :, :20] = False
    mask[:, 3, :, :7] = False
    layer.attend(torch.randn(1, HEADS, 40, 32), mask.expand(-1, -1, 40, -1))
    assert layer.state is not None
    assert layer.state.lengths.tolist() == [[7, 40, 0]]
