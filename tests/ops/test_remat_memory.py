"""Attention to cached inputs holds keys and values of a block, never all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_kvq import quantize_x, reference
from torch_kvq.reference.remat import BLOCK_TOKENS

CHANNELS, HEADS, DIM = 64, 2, 32


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that an operation gives; those of records do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.dtype != torch.uint8:
                self.elements = max(self.elements, tensor.numel())
        return out


def largest(
    tokens: int,
    dtype: torch.dtype,
    bits: tuple[int, ...],
    split: bool = False,
    queries: int = 1,
    **options: Any,
) -> int:
    """What attention to so many packed tokens and a few exact ones takes at most at a time."""
    x = torch.randn(1, tokens, CHANNELS).to(dtype)
    records = [quantize_x(x, width) for width in bits]
    exact = x[:, :100]
    values: dict[str, Any] = {"value_records": [], "value_bits": [], "value_exact": None}
    if split:
        values = {"value_records": records, "value_bits": list(bits), "value_exact": exact}
    weight = torch.randn(HEADS * DIM, CHANNELS).to(dtype)
    query = torch.randn(1, HEADS, queries, DIM).to(dtype)
    lengths = torch.tensor([[0, tokens + 100, tokens]], dtype=torch.int32)
    with Largest() as mode:
        reference.remat_attention(
            query,
            records,
            exact=exact,
            lengths=lengths,
            key_weight=weight,
            value_weight=weight,
            bits=list(bits),
            kv_heads=HEADS,
            **values,
            **options,
        )
    return mode.elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {"bits": (4,)},
        {"bits": (4, 2)},
        {"bits": (16,)},
        {"bits": (4,), "split": True},
        {"bits": (4,), "absorb_key": False, "absorb_value": False},
        {"bits": (4,), "absorb_key": True, "absorb_value": True},
        {"bits": (4,), "queries": 16, "is_causal": True},
    ],
    ids=str,
)
def test_no_tensor_grows_with_the_tokens(options: dict[str, Any], dtype: torch.dtype) -> None:
    few, many = (largest(tokens, dtype, **options) for tokens in (1024, 4096))
    assert few == many <= BLOCK_TOKENS * CHANNELS
    assert 8 * many <= 4096 * HEADS * DIM, "a block is a small part of all keys"
