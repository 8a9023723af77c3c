"""Differences of layer inputs from layer to layer, as decoding will add them up."""

from __future__ import annotations

from torch import Tensor

from torch_kvq.reference.x import dequantize_x, quantize_x


def quantize_difference(x: Tensor, below: Tensor, bits: int, axis: str) -> Tensor:
    """Encode what a layer's input differs from what the layer below hands on.

    Args:
        x: ``[batch, tokens, channels]``, tokens a multiple of 64.
        below: the same of the layer below, rebuilt from its codes.
        bits: bits of the records.
        axis: axis of the records.

    Returns:
        Records, uint8 ``[batch, pages, record_bytes]``.
    """
    return quantize_x(x - below, bits, axis)


def dequantize_difference(records: Tensor, below: Tensor, bits: int, axis: str) -> Tensor:
    """Rebuild a layer's input from its difference.

    Args:
        records: uint8 ``[batch, pages, record_bytes]``.
        below: what the layer below hands on, ``[batch, 64 * pages, channels]``.
        bits: bits of the records.
        axis: axis of the records.

    Returns:
        ``[batch, 64 * pages, channels]`` in the dtype of ``below``.
    """
    return below + dequantize_x(records, below.shape[-1], bits, axis, dtype=below.dtype)
