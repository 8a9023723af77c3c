"""The attention that keys draw, against a naive form in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from torch_kvq import attention_mass

BATCH, HEADS, KV_HEADS, QUERIES, TOKENS, DIM = 2, 6, 2, 5, 40, 32


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs() -> tuple[Tensor, Tensor]:
    return normal(BATCH, HEADS, QUERIES, DIM), normal(BATCH, KV_HEADS, TOKENS, DIM, seed=1)


def weights(query: Tensor, key: Tensor, allowed: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax in float64, ``[batch, heads, queries, tokens]``; 0 where nothing is allowed."""
    key = key.repeat_interleave(HEADS // KV_HEADS, 1)
    score = (query.double() @ key.double().mT * DIM**-0.5).exp() * allowed
    total = score.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.double().exp().view(-1, 1, 1)
    return (score / total).nan_to_num(0.0)


def check(got: tuple[Tensor, Tensor], weight: Tensor) -> None:
    grouped = weight.unflatten(1, (KV_HEADS, -1))
    mass, greatest = grouped.mean((2, 3)), grouped.amax((2, 3)).log()
    torch.testing.assert_close(got[0].double(), mass, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(got[1].double(), greatest, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_positions(is_causal: bool, window: int | None) -> None:
    query, key = inputs()
    distance = torch.arange(TOKENS - QUERIES, TOKENS).unsqueeze(1) - torch.arange(TOKENS)
    allowed = torch.ones(QUERIES, TOKENS, dtype=torch.bool)
    allowed &= (distance >= 0) | (not is_causal)
    allowed &= distance < (window or TOKENS + 1)
    got = attention_mass(query, key, is_causal=is_causal, sliding_window=window)
    check(got, weights(query, key, allowed))


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_masks(kind: torch.dtype) -> None:
    """Masked keys draw nothing, nor does a row whose queries attend to nothing."""
    query, key = inputs()
    allowed = normal(BATCH, 1, QUERIES, TOKENS, seed=2) > 0
    allowed[1] = False
    mask = allowed if kind == torch.bool else torch.where(allowed, 0.0, -torch.inf)
    wide = torch.nn.functional.pad(mask, (0, 3), value=True)
    got = attention_mass(query, key, wide)
    check(got, weights(query, key, allowed))
    assert not got[0][1].any() and (got[1][1] == -torch.inf).all()


def test_sinks_take_their_part() -> None:
    query, key = inputs()
    sinks = normal(HEADS, seed=3)
    got = attention_mass(query, key, sinks=sinks)
    check(got, weights(query, key, torch.ones(TOKENS, dtype=torch.bool), sinks))


def test_softcap() -> None:
    query, key = inputs()
    capped = attention_mass(8 * query, key, softcap=2.0)[0]
    score = 8 * query.double() @ key.double().repeat_interleave(3, 1).mT * DIM**-0.5
    weight = (2.0 * (score / 2.0).tanh()).softmax(-1).unflatten(1, (KV_HEADS, -1)).mean((2, 3))
    torch.testing.assert_close(capped.double(), weight, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": normal(BATCH, 5, QUERIES, DIM)}, "query heads must be a multiple of 2"),
        ({"key": normal(KV_HEADS, TOKENS, DIM)}, "key must have 4 dim"),
        ({"attn_mask": torch.ones(1, 1, 1, 39, dtype=torch.bool)}, "attn_mask"),
        ({"softcap": 0.0}, "softcap must be positive, got 0"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
    ],
)
def test_errors(change: dict[str, Any], message: str) -> None:
    query, key = inputs()
    with pytest.raises(ValueError, match=message):
        attention_mass(**{"query": query, "key": key, **change})


def test_operator() -> None:
    query, key = inputs()
    mask = torch.ones(BATCH, 1, QUERIES, TOKENS, dtype=torch.bool)
    arguments = {"scale": 0.2, "is_causal": True, "sinks": normal(HEADS)}
    torch.library.opcheck(torch.ops.kvq.attention_mass.default, (query, key, mask), arguments)
