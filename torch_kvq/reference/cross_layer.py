"""Differences of layer inputs from layer to layer, as decoding will add them up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sum_of_records(
    records: Sequence[Tensor], channels: int, bits: Sequence[int], axis: str, dtype: torch.dtype
) -> Tensor:
    """Rebuild inputs that are the sum of several records, as `torch_kvq.remat_attention` does.

    Args:
        records: uint8 ``[batch, pages, record_bytes]`` each.
        channels: channels of the input.
        bits: bits of each.
        axis: axis of all.
        dtype: dtype of the result, and of records of 16 bits.

    Returns:
        ``[batch, 64 * pages, channels]``.
    """
    total: Tensor | None = None
    for part, own in zip(records, bits, strict=True):
        x = torch.ops.kvq.dequantize_x(part, channels, own, axis, True, dtype)
        total = x if total is None else total + x
    assert total is not None
    return total


def quantize_difference(
    x: Tensor,
    below: Sequence[Tensor],
    below_bits: Sequence[int],
    bits: int,
    axis: str,
) -> Tensor:
    """Encode what a layer's input differs from what the layer below hands on.

    Args:
        x: ``[batch, tokens, channels]``, tokens a multiple of 64.
        below: records of the layer below, whose sum its input is rebuilt to.
        below_bits: bits of each of them.
        bits: bits of the records.
        axis: axis of all records.

    Returns:
        Records, uint8 ``[batch, pages, record_bytes]``.
    """
    rebuilt = sum_of_records(below, x.shape[-1], below_bits, axis, x.dtype)
    difference: Tensor = torch.ops.kvq.quantize_x(x - rebuilt, bits, axis)
    return difference
