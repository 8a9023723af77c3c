"""Meaning of ``kvq::quantize_x`` and ``kvq::dequantize_x`` (docs/formats.md, "X record")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_kvq import _x_checks
from torch_kvq._x_formats import GROUP, INT8_MOST, XFormat
from torch_kvq.formats import TILE_TOKENS
from torch_kvq.reference import hadamard
from torch_kvq.reference.decode import read_bytes
from torch_kvq.reference.encode import (
    encode_rotated,
    levels,
    quantized_mean,
    read_input,
    to_bytes,
)


def quantize_x(x: Tensor, bits: int, axis: str = "token", rotate: bool = True) -> Tensor:
    """Encode layer inputs into records.

    Args:
        x: ``[batch, tokens, channels]``, float32, float16 or bfloat16.
        bits: 2, 3, 4, 8 or 16.
        axis: ``"token"`` or ``"channel"``.
        rotate: rotate blocks of 64 channels.

    Returns:
        uint8 ``[batch, pages, record_bytes]``.
    """
    layout = _x_checks.check_x(x, bits, axis)
    pages = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % TILE_TOKENS))
    pages = pages.unflatten(1, (-1, TILE_TOKENS))
    if layout.is_pass_through:
        return to_bytes(pages)
    z = read_input(pages).unflatten(-1, (-1, GROUP))
    z = hadamard.transform(z) if rotate else z
    if axis == "token":
        scale, codes = _encode_groups(z, bits)
        return torch.cat((to_bytes(scale), to_bytes(_pack(codes, bits))), -1)
    z = z.transpose(2, 3)
    mean, mean_scale = quantized_mean(z)
    offset = mean.to(torch.float32) * mean_scale.to(torch.float32)
    scale, codes = _encode_groups((z - offset.unsqueeze(-2)).mT.contiguous(), bits)
    parts = (scale, mean, mean_scale, _pack(codes, bits))
    return torch.cat([to_bytes(part) for part in parts], -1)


def _encode_groups(z: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Float16 scales ``[...]`` and uint8 codes ``[..., 64]`` of groups ``[..., 64]``."""
    if bits < 8:
        return encode_rotated(z, bits)
    scale = (z.abs().amax(-1) / INT8_MOST).to(torch.float16)
    divisor = scale.to(torch.float32).unsqueeze(-1)
    steps = torch.where(divisor > 0, z / divisor, torch.zeros_like(z))
    codes = steps.round().clamp(-INT8_MOST, INT8_MOST).to(torch.int8)
    return scale, codes.view(torch.uint8)


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Codes ``[..., 64]`` to bytes ``[..., 8 * bits]``."""
    if bits == 8:
        return codes
    if bits == 3:
        byte = codes.unflatten(-1, (8, 8)) >> 2
        high = (byte << torch.arange(8, device=codes.device, dtype=torch.uint8)).sum(-1)
        return torch.cat((_pack(codes & 3, 2), high.to(torch.uint8)), -1)
    per_byte = 8 // bits
    parts = codes.unflatten(-1, (per_byte, -1)).unbind(-2)
    packed = parts[0]
    for i in range(1, per_byte):
        packed = packed | parts[i] << (bits * i)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """Undo `_pack`."""
    if bits == 8:
        return packed
    if bits == 3:
        shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
        high = (packed[..., 16:].unsqueeze(-1) >> shifts & 1).flatten(-2)
        return _unpack(packed[..., :16], 2) | high << 2
    parts = [packed >> (bits * i) & (2**bits - 1) for i in range(8 // bits)]
    return torch.cat(parts, -1)


def dequantize_x(
    records: Tensor,
    channels: int,
    bits: int,
    axis: str = "token",
    rotate: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Decode records into layer inputs.

    Args:
        records: uint8 ``[batch, pages, record_bytes]``.
        channels: channels of the input.
        bits: 2, 3, 4, 8 or 16.
        axis: ``"token"`` or ``"channel"``.
        rotate: rotate back.
        dtype: dtype of the result; at 16 bits that of the records.

    Returns:
        ``[batch, 64 * pages, channels]``.
    """
    layout = _x_checks.check_x_records(records, channels, bits, axis, dtype)
    if layout.is_pass_through:
        raw = read_bytes(records, 0, layout.code_bytes, dtype)
        return raw.reshape(records.shape[0], -1, channels)
    z = _read_groups(records, layout)
    z = hadamard.transform(z) if rotate else z
    return z.flatten(-2).flatten(1, 2).to(dtype)


def _read_groups(records: Tensor, layout: XFormat) -> Tensor:
    """Values of the groups, float32 ``[batch, pages, 64, groups, 64]``, channels last."""
    lead = records.shape[:2]
    shape = (TILE_TOKENS, layout.groups) if layout.axis == "token" else (layout.groups, GROUP)
    scale = read_bytes(records, 0, layout.scale_bytes, torch.float16).reshape(*lead, *shape)
    packed = read_bytes(records, layout.code_offset, layout.code_bytes, torch.uint8)
    codes = _unpack(packed.reshape(*lead, *shape, 8 * layout.bits), layout.bits)
    level = (
        codes.view(torch.int8).to(torch.float32)
        if layout.bits == 8
        else levels(layout.bits, codes.device)[codes.long()]
    )
    z = level * scale.to(torch.float32).unsqueeze(-1)
    if layout.axis == "token":
        return z
    mean = read_bytes(records, layout.mean_offset, layout.channels, torch.int8)
    mean_scale = read_bytes(records, layout.mean_scale_offset, 2 * layout.groups, torch.float16)
    offset = mean.reshape(*lead, *shape).to(torch.float32) * mean_scale.to(torch.float32).unsqueeze(
        -1
    )
    return (z + offset.unsqueeze(-1)).movedim(-1, 2)


def sum_x(
    records: Sequence[Tensor],
    channels: int,
    bits: Sequence[int],
    out_bits: int,
    axis: str = "token",
) -> Tensor:
    """Encode the sum of what records hold, without turning it back.

    Args:
        records: uint8 ``[batch, pages, record_bytes]`` each.
        channels: channels of the input.
        bits: 2, 3, 4 or 8, of each of them.
        out_bits: bits of the result.
        axis: axis of all of them and of the result.

    Returns:
        uint8 ``[batch, pages, record_bytes]``.
    """
    _x_checks.check_x_sum(records, channels, bits, out_bits, axis)
    total, *others = (
        dequantize_x(part, channels, width, axis, rotate=False)
        for part, width in zip(records, bits, strict=True)
    )
    for part in others:
        total = total + part
    return quantize_x(total, out_bits, axis, rotate=False)
