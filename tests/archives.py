"""Tokens for archives, and what an archive holds of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_kvq.cache.archive import ArchiveLayer

PAGE = 64
PAGE_BYTES = PAGE * 2 * (32 + 48) * 4
"""Bytes of a page of the float32 tokens below."""
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def tokens_of(batch: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Random bits of 2 heads, NaN and infinities among them; dims 32 and 48."""
    integers = torch.int32 if dtype.itemsize == 4 else torch.int16
    limit = torch.iinfo(integers)

    def bits(dim: int) -> Tensor:
        shape = (batch, 2, tokens, dim)
        return torch.randint(limit.min, limit.max, shape, dtype=integers).view(dtype)

    return bits(32), bits(48)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def read_all(layer: ArchiveLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and what was found, ``[rows, heads, tokens, ...]``."""
    shape = (layer.rows, 2, layer.tokens)
    places = torch.cartesian_prod(*(torch.arange(size) for size in shape)).view(-1, 3)
    key, value, found = layer.read(*places.unbind(1))
    return key.view(*shape, -1), value.view(*shape, -1), found.view(shape)


def assert_holds(layer: ArchiveLayer, key: Tensor, value: Tensor) -> None:
    got_key, got_value, found = read_all(layer)
    assert found.all()
    assert same_bits(got_key, key)
    assert same_bits(got_value, value)
