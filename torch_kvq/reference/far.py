"""Meaning of ``kvq::quantize_far`` and ``kvq::dequantize_far`` (docs/formats.md, "Far record")."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_kvq import _checks, formats
from torch_kvq.reference import packing
from torch_kvq.reference.decode import read_bytes
from torch_kvq.reference.encode import read_input, to_bytes


def quantize_far(key: Tensor, value: Tensor) -> Tensor:
    """Encode tiles of 64 tokens into far records.

    Args:
        key: ``[tiles, kv_heads, 64, key_dim]``, float32, float16 or bfloat16.
        value: ``[tiles, kv_heads, 64, value_dim]`` in the same dtype.

    Returns:
        uint8 ``[tiles, kv_heads, record_bytes]``.
    """
    _checks.check_far_input(key, value)
    key_scale, key_codes = encode_fp8(key)
    value_scale, middle, value_codes = encode_int4(value)
    parts = [
        to_bytes(key_scale),
        pack_fp8(key_codes),
        to_bytes(value_scale),
        to_bytes(middle),
        packing.pack(value_codes, "value", 4),
    ]
    return torch.cat(parts, -1)


def encode_fp8(key: Tensor) -> tuple[Tensor, Tensor]:
    """Float16 scales ``[..., tokens]`` and E4M3 codes, uint8 ``[..., tokens, dim]``."""
    k = read_input(key)
    scale = (k.abs().amax(-1, keepdim=True) / formats.FP8_MAX).to(torch.float16)
    divisor = scale.to(torch.float32)
    scaled = torch.where(divisor > 0, k / divisor, torch.zeros_like(k))
    codes = scaled.clamp(-formats.FP8_MAX, formats.FP8_MAX).to(torch.float8_e4m3fn)
    return scale.squeeze(-1), codes.view(torch.uint8)


def encode_int4(value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Float16 scales and middles ``[..., tokens]`` and codes, uint8 ``[..., tokens, dim]``."""
    v = read_input(value)
    low, high = v.amin(-1, keepdim=True), v.amax(-1, keepdim=True)
    # Adding 0 makes zeros positive, whose signs would depend on the order of the channels.
    middle = ((low + high) * 0.5 + 0.0).to(torch.float16)
    scale = ((high - low) / (2 * formats.FAR_VALUE_STEPS) + 0.0).to(torch.float16)
    step = 2 * scale.to(torch.float32)
    offset = v - middle.to(torch.float32)
    steps = torch.where(step > 0, offset / step, torch.zeros_like(v))
    codes = (steps + formats.FAR_VALUE_STEPS / 2).round().clamp(0, formats.FAR_VALUE_STEPS)
    return scale.squeeze(-1), middle.squeeze(-1), codes.to(torch.uint8)


def dequantize_far(
    tiles: Tensor, key_dim: int, value_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Decode far records into keys and values.

    Args:
        tiles: uint8 ``[tiles, kv_heads, record_bytes]``.
        key_dim: channels of the keys.
        value_dim: channels of the values.
        dtype: dtype of the result.

    Returns:
        ``[tiles, kv_heads, 64, key_dim]`` and ``[tiles, kv_heads, 64, value_dim]``.
    """
    layout = _checks.check_far_records(tiles, key_dim, value_dim, dtype)
    scale_bytes = 2 * formats.TILE_TOKENS
    key_scale, value_scale, middle = (
        read_bytes(tiles, offset, scale_bytes, torch.float16).to(torch.float32).unsqueeze(-1)
        for offset in (
            layout.key_scale_offset,
            layout.value_scale_offset,
            layout.value_middle_offset,
        )
    )
    packed = read_bytes(tiles, layout.key_code_offset, layout.key_code_bytes, torch.uint8)
    key = unpack_fp8(packed).view(torch.float8_e4m3fn).to(torch.float32) * key_scale
    packed = read_bytes(tiles, layout.value_code_offset, layout.value_code_bytes, torch.uint8)
    level = 2 * packing.unpack(packed, "value", 4).to(torch.float32) - formats.FAR_VALUE_STEPS
    return key.to(dtype), (level * value_scale + middle).to(dtype)


def pack_fp8(codes: Tensor) -> Tensor:
    """E4M3 codes ``[..., 64, dim]`` to lines of 16 tokens by 4 channels, ``[..., 64 * dim]``."""
    lead, dim = codes.shape[:-2], codes.shape[-1]
    parts = codes.reshape(*lead, 4, 4, 4, dim // 4, 2, 2)
    return parts.movedim((-6, -3, -5, -2, -4, -1), (-6, -5, -4, -3, -2, -1)).reshape(
        *lead, formats.TILE_TOKENS * dim
    )


def unpack_fp8(packed: Tensor) -> Tensor:
    """Undo `pack_fp8`: uint8 ``[..., 64 * dim]`` to uint8 ``[..., 64, dim]``."""
    lead, dim = packed.shape[:-1], packed.shape[-1] // formats.TILE_TOKENS
    parts = packed.reshape(*lead, 4, dim // 4, 4, 2, 4, 2)
    return (
        parts.movedim((-6, -5, -4, -3, -2, -1), (-6, -3, -5, -2, -4, -1))
        .reshape(*lead, formats.TILE_TOKENS, dim)
        .contiguous()
    )
