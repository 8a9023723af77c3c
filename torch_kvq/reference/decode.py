"""Meaning of ``kvq::dequantize_tile`` (docs/formats.md, "Decoding")."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_kvq import _checks, formats
from torch_kvq.reference import hadamard, packing
from torch_kvq.reference.encode import levels


class Parts(NamedTuple):
    """Unpacked records ``[tiles, kv_heads, record_bytes]`` of quantised keys and values."""

    key_scale: Tensor
    key_codes: Tensor
    value_scale: Tensor
    value_codes: Tensor
    mean: Tensor
    mean_scale: Tensor


def read_bytes(tiles: Tensor, offset: int, size: int, dtype: torch.dtype) -> Tensor:
    """Elements of ``dtype`` in ``size`` bytes of every record, as a copy."""
    return (
        tiles[..., offset : offset + size].clone(memory_format=torch.contiguous_format).view(dtype)
    )


def read_record(tiles: Tensor, layout: formats.TileFormat) -> Parts:
    """Split quantised records into their parts, codes unpacked."""
    key_codes = read_bytes(tiles, layout.key_code_offset, layout.key_code_bytes, torch.uint8)
    value_codes = read_bytes(tiles, layout.value_code_offset, layout.value_code_bytes, torch.uint8)
    scale_bytes = 2 * formats.TILE_TOKENS
    return Parts(
        read_bytes(tiles, layout.key_scale_offset, scale_bytes, torch.float16),
        packing.unpack(key_codes, "key", layout.key_bits),
        read_bytes(tiles, layout.value_scale_offset, scale_bytes, torch.float16),
        packing.unpack(value_codes, "value", layout.value_bits),
        read_bytes(tiles, layout.mean_offset, layout.key_dim, torch.int8),
        read_bytes(tiles, layout.mean_scale_offset, 2, torch.float16),
    )


def check_records(
    tiles: Tensor,
    balance: Tensor,
    key_bits: int,
    value_bits: int,
    value_dim: int,
    dtype: torch.dtype,
) -> formats.TileFormat:
    """Check records against the balance and options they are decoded with.

    Returns:
        The record format.
    """
    _checks.check_rank(3, tiles=tiles, balance=balance)
    _checks.check_dtype(torch.uint8, tiles=tiles)
    if dtype not in _checks.FLOATS:
        raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
    layout = formats.TileFormat(balance.shape[2], value_dim, key_bits, value_bits, dtype.itemsize)
    _checks.check_balance(balance, tiles.shape[0], tiles.shape[1], balance.shape[2])
    _checks.check_shape("tiles", tiles, (2, layout.record_bytes, "record_bytes"))
    _checks.check_same_device(tiles=tiles, balance=balance)
    return layout


def dequantize_tile(
    tiles: Tensor,
    balance: Tensor,
    key_bits: int,
    value_bits: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Decode records into keys and values.

    Args:
        tiles: uint8 ``[tiles, kv_heads, record_bytes]``.
        balance: float32 ``[tiles or 1, kv_heads, key_dim]``.
        key_bits: bits of the keys.
        value_bits: bits of the values.
        value_dim: channels of the values.
        dtype: dtype of the result; at 16 bits that of the records.

    Returns:
        ``[tiles, kv_heads, 64, key_dim]`` and ``[tiles, kv_heads, 64, value_dim]``.
    """
    layout = check_records(tiles, balance, key_bits, value_bits, value_dim, dtype)
    shape = (*tiles.shape[:2], formats.TILE_TOKENS)
    if layout.is_pass_through:
        key = read_bytes(tiles, layout.key_code_offset, layout.key_code_bytes, dtype)
        value = read_bytes(tiles, layout.value_code_offset, layout.value_code_bytes, dtype)
        return key.reshape(*shape, layout.key_dim), value.reshape(*shape, value_dim)
    parts = read_record(tiles, layout)
    key = _decode_keys(parts, balance, key_bits)
    return key.to(dtype), _decode_values(parts, value_bits).to(dtype)


def _decode_keys(parts: Parts, balance: Tensor, bits: int) -> Tensor:
    z = _scaled_levels(parts.key_codes, parts.key_scale, bits)
    signs = formats.signs("key", z.shape[-1]).to(z.device)
    offset = parts.mean.to(torch.float32) * parts.mean_scale.to(torch.float32)
    unbalanced = signs * hadamard.transform(z, inverse=True) / balance.unsqueeze(-2)
    return unbalanced + offset.unsqueeze(-2)


def _decode_values(parts: Parts, bits: int) -> Tensor:
    z = _scaled_levels(parts.value_codes, parts.value_scale, bits)
    signs = formats.signs("value", z.shape[-1]).to(z.device)
    return signs * hadamard.transform(z, inverse=True)


def _scaled_levels(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    return scale.to(torch.float32).unsqueeze(-1) * levels(bits, codes.device)[codes.long()]
