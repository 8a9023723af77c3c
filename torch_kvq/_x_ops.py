"""The operators on records of layer inputs: schema, fake kernel and typed wrapper of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_kvq import _x_checks, reference
from torch_kvq._ops import define
from torch_kvq.formats import TILE_TOKENS


def _quantize_x_fake(x: Tensor, bits: int, axis: str = "token", rotate: bool = True) -> Tensor:
    layout = _x_checks.check_x(x, bits, axis)
    pages = (x.shape[1] + TILE_TOKENS - 1) // TILE_TOKENS
    return x.new_empty((x.shape[0], pages, layout.record_bytes), dtype=torch.uint8)


define(
    'quantize_x(Tensor x, int bits, str axis="token", bool rotate=True) -> Tensor',
    reference.quantize_x,
    _quantize_x_fake,
)


def quantize_x(x: Tensor, bits: int = 4, axis: str = "token", rotate: bool = True) -> Tensor:
    """Encode the inputs of a layer into records of 64 tokens (docs/formats.md, "X record").

    A token costs ``channels * (bits / 8 + 1 / 32)`` bytes with ``axis="token"``, where it is
    encoded alone, and ``channels * (bits / 8 + 3 / 64 + 1 / 2048)`` with ``axis="channel"``. NaN is
    stored as 0, infinities as the largest float16. At 16 bits the record is the raw input.

    Args:
        x: ``[batch, tokens, channels]``, float32, float16 or bfloat16; channels a multiple of 64,
            tokens too with ``axis="channel"``. A last page of fewer tokens is filled with zeros.
        bits: 2, 3, 4, 8 or 16.
        axis: ``"token"`` for groups of 64 channels of a token, ``"channel"`` for groups of the 64
            tokens of a channel, whose means are stored.
        rotate: rotate blocks of 64 channels by an orthonormal Hadamard transform before. Not for
            channels that are rotated already, and never done at 16 bits.

    Returns:
        Records, uint8 ``[batch, ceil(tokens / 64), record_bytes]``.

    Raises:
        ValueError: shapes, dtypes or options outside the above.

    Example:
        >>> quantize_x(torch.randn(2, 100, 576)).shape
        torch.Size([2, 2, 19584])
    """
    return torch.ops.kvq.quantize_x(x, bits, axis, rotate)


def _dequantize_x_fake(
    records: Tensor,
    channels: int,
    bits: int,
    axis: str = "token",
    rotate: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    _x_checks.check_x_records(records, channels, bits, axis, dtype)
    shape = (records.shape[0], records.shape[1] * TILE_TOKENS, channels)
    return records.new_empty(shape, dtype=dtype)


define(
    'dequantize_x(Tensor records, int channels, int bits, str axis="token", bool rotate=True, '
    "ScalarType dtype=float32) -> Tensor",
    reference.dequantize_x,
    _dequantize_x_fake,
)


def dequantize_x(
    records: Tensor,
    channels: int,
    bits: int = 4,
    axis: str = "token",
    rotate: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Decode records into layer inputs, the inverse of `quantize_x`.

    Args:
        records: uint8 ``[batch, pages, record_bytes]``.
        channels: channels of the input.
        bits: bits of the records.
        axis: axis of the records.
        rotate: rotate back; without, rotated records decode to rotated channels.
        dtype: dtype of the result, rounded to once; at 16 bits that of the records.

    Returns:
        ``[batch, 64 * pages, channels]``.

    Raises:
        ValueError: shapes, dtypes or options that do not match the records.

    Example:
        >>> x = torch.randn(1, 128, 576)
        >>> decoded = dequantize_x(quantize_x(x), 576)
        >>> bool((decoded - x).norm() / x.norm() < 0.1)
        True
    """
    return torch.ops.kvq.dequantize_x(records, channels, bits, axis, rotate, dtype)


def _sum_x_fake(
    records: Sequence[Tensor],
    channels: int,
    bits: Sequence[int],
    out_bits: int,
    axis: str = "token",
) -> Tensor:
    layout = _x_checks.check_x_sum(records, channels, bits, out_bits, axis)
    first = records[0]
    return first.new_empty((first.shape[0], first.shape[1], layout.record_bytes))


define(
    'sum_x(Tensor[] records, int channels, int[] bits, int out_bits, str axis="token") -> Tensor',
    reference.sum_x,
    _sum_x_fake,
)


def sum_x(
    records: Sequence[Tensor],
    channels: int,
    bits: Sequence[int],
    out_bits: int = 4,
    axis: str = "token",
) -> Tensor:
    """Encode the sum of what records hold: an accumulator and the difference of a layer to it.

    What is rotated stays rotated, so nothing is turned back and again.

    Args:
        records: one or more of uint8 ``[batch, pages, record_bytes]``, all rotated or none.
        channels: channels of the input.
        bits: 2, 3, 4 or 8, of each of ``records``.
        out_bits: bits of the result, 2, 3, 4 or 8.
        axis: axis of all of them and of the result.

    Returns:
        Records, uint8 ``[batch, pages, record_bytes]``, rotated where those given are.

    Raises:
        ValueError: shapes, dtypes or options that do not match the records.

    Example:
        >>> x, y = torch.randn(2, 1, 64, 128)
        >>> total = sum_x([quantize_x(x), quantize_x(y)], 128, [4, 4])
        >>> decoded = dequantize_x(total, 128)
        >>> bool((decoded - x - y).norm() / (x + y).norm() < 0.15)
        True
    """
    return torch.ops.kvq.sum_x(list(records), channels, list(bits), out_bits, axis)
