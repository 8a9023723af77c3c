"""Meaning of ``kvq::remat_kv``, and what runs on every device.

The matrix products are those of PyTorch; records are unpacked by ``kvq::dequantize_x``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_kvq import _x_checks
from torch_kvq.formats import PASS_THROUGH_BITS, TILE_TOKENS

BLOCK_TOKENS = 512
"""Tokens whose keys and values exist at a time."""


class Source(NamedTuple):
    """Where the cached inputs of keys or of values are: records, then exact tokens."""

    records: Sequence[Tensor]
    bits: Sequence[int]
    axis: str
    rotate: bool
    channels: int
    raw: torch.dtype
    exact: Tensor | None = None

    def read(self, row: int, first: int, end: int, dtype: torch.dtype) -> Tensor:
        """Tokens of whole pages of a row, ``[tokens, channels]``, the sum of all records."""
        pages = slice(first // TILE_TOKENS, -(-end // TILE_TOKENS))
        wide = dtype if len(self.records) == 1 else torch.float32
        total: Tensor | None = None
        for part, bits in zip(self.records, self.bits, strict=True):
            own = self.raw if bits == PASS_THROUGH_BITS else wide
            decoded = torch.ops.kvq.dequantize_x(
                part[row : row + 1, pages], self.channels, bits, self.axis, self.rotate, own
            )[0].to(wide)
            total = decoded if total is None else total.add_(decoded)
        assert total is not None
        return total[: end - first].to(dtype)


class Scratch:
    """Memory of the products of a block, used again by the next: fresh pages cost more to touch."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(
        self, name: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """An uninitialised tensor that lives until the name is taken again."""
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name] = like.new_empty(size, dtype=dtype)
        return buffer[:size].view(shape)


class Weights(NamedTuple):
    """Projections of cached inputs to keys and values."""

    key: Tensor
    value: Tensor
    key_bias: Tensor | None
    value_bias: Tensor | None
    key_norm: Tensor | None
    norm_eps: float
    cos: Tensor | None
    sin: Tensor | None
    sizes: _x_checks.Projections
    scratch: Scratch

    def keys(self, x: Tensor, row: int, first: int) -> Tensor:
        """Keys of the tokens from ``first`` on, float32 ``[kv_heads, tokens, key_dim]``."""
        key = self._project("key", x, self.key, self.key_bias)
        if self.key_norm is not None:
            variance = key.square().mean(-1, keepdim=True)
            key.mul_(torch.rsqrt(variance + self.norm_eps)).mul_(self.key_norm.to(torch.float32))
        if self.cos is not None and self.sin is not None:
            row = row if self.cos.shape[0] > 1 else 0
            tokens = slice(first, first + x.shape[0])
            cos, sin = self.cos[row, tokens].float(), self.sin[row, tokens].float()
            shape = (*key.shape[:2], cos.shape[-1] // 2)
            _rotate_positions_(key, cos, sin, self.scratch.take("half", shape, x))
        return key

    def values(self, x: Tensor) -> Tensor:
        """Values, float32 ``[kv_heads, tokens, value_dim]``."""
        return self._project("value", x, self.value, self.value_bias)

    def widen(self, x: Tensor) -> Tensor:
        """Inputs in float32."""
        if x.dtype == torch.float32:
            return x
        return self.scratch.take("input", x.shape, x).copy_(x)

    def _project(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shape = (x.shape[0], weight.shape[0])
        y = torch.mm(x, weight.t(), out=self.scratch.take(name, shape, x, x.dtype))
        if y.dtype != torch.float32:
            y = self.scratch.take(f"float32 {name}", shape, x).copy_(y)
        if bias is not None:
            y.add_(bias)
        return y.unflatten(-1, (self.sizes.kv_heads, -1)).transpose(0, 1)


def _rotate_positions_(key: Tensor, cos: Tensor, sin: Tensor, kept: Tensor) -> None:
    """Rotary embedding of the first channels in place, whose halves make the pairs."""
    half = cos.shape[-1] // 2
    first, second = key[..., :half], key[..., half : 2 * half]
    torch.mul(first, sin[..., half:], out=kept)
    first.mul_(cos[..., :half]).addcmul_(second, sin[..., :half], value=-1)
    second.mul_(cos[..., half:]).add_(kept)


def product_dtype(weight: Tensor) -> torch.dtype:
    """Dtype of the matrix products: a CPU has none in float16 that is fast, and not every bfloat16.

    Without instructions for it, a product in bfloat16 takes several times as long as in float32.
    """
    if weight.device.type != "cpu":
        return weight.dtype
    if weight.dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32


@torch.no_grad()
def remat_kv(
    records: Sequence[Tensor],
    value_records: Sequence[Tensor],
    key_weight: Tensor,
    value_weight: Tensor,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    key_norm: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    bits: Sequence[int],
    value_bits: Sequence[int] = (),
    kv_heads: int,
    axis: str = "token",
    value_axis: str = "token",
    rotate: bool = True,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Keys and values of all cached inputs; the arguments are those of ``torch_kvq.remat_kv``.

    Args:
        records: uint8 ``[batch, pages, record_bytes]`` each.
        value_records: the same for values, empty where they share the input of the keys.
        key_weight: ``[kv_heads * key_dim, channels]``.
        value_weight: ``[kv_heads * value_dim, channels]``.
        key_bias: ``[kv_heads * key_dim]``.
        value_bias: ``[kv_heads * value_dim]``.
        key_norm: ``[key_dim]``.
        cos: ``[batch or 1, tokens, rotary_dim]``.
        sin: the same.
        bits: bits of each of the records.
        value_bits: bits of each of the value records.
        kv_heads: key and value heads.
        axis: axis of the records.
        value_axis: axis of the value records.
        rotate: rotate back.
        norm_eps: added to the variance.

    Returns:
        ``[batch, kv_heads, tokens, dim]`` of keys and of values in the weights' dtype.
    """
    sizes = _x_checks.check_remat(
        records,
        value_records,
        key_weight,
        value_weight,
        key_bias,
        value_bias,
        key_norm,
        cos,
        sin,
        bits,
        value_bits,
        kv_heads,
        axis,
        value_axis,
        norm_eps,
    )
    batch, tokens = records[0].shape[0], records[0].shape[1] * TILE_TOKENS
    _x_checks.check_tokens(cos, tokens)
    raw = key_weight.dtype
    source = Source(records, bits, axis, rotate, sizes.key_channels, raw)
    value_source = Source(value_records, value_bits, value_axis, rotate, sizes.value_channels, raw)
    dtype = product_dtype(key_weight)
    weights = Weights(key_weight.to(dtype), value_weight.to(dtype), key_bias, value_bias, key_norm,
                      norm_eps, cos, sin, sizes, Scratch())  # fmt: skip
    key = key_weight.new_empty((batch, kv_heads, tokens, sizes.key_dim))
    value = key_weight.new_empty((batch, kv_heads, tokens, sizes.value_dim))
    for row in range(batch):
        for first in range(0, tokens, BLOCK_TOKENS):
            end = min(first + BLOCK_TOKENS, tokens)
            x = source.read(row, first, end, dtype)
            key[row, :, first:end] = weights.keys(x, row, first)
            x = value_source.read(row, first, end, dtype) if value_records else x
            value[row, :, first:end] = weights.values(x)
    return key, value
