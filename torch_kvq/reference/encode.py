"""Meaning of ``kvq::key_balance`` and ``kvq::quantize_tile`` (docs/formats.md, "Encoding").

The kernels reproduce every record bit for bit, so the order of the float32 operations here is
part of the format.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torch_kvq import _checks, formats
from torch_kvq.reference import hadamard, packing

_HALF_MAX = 65504.0


def read_input(x: Tensor) -> Tensor:
    """Float32 values of new keys or values: NaN as zero, magnitudes clamped."""
    limit = formats.LARGEST_INPUT
    return x.to(torch.float32).nan_to_num(0.0, limit, -limit).clamp(-limit, limit)


def square_root(x: Tensor) -> Tensor:
    """Correctly rounded square root of float32."""
    if x.device.type != "cpu":
        return x.sqrt()
    # The vector library behind float32 sqrt on the CPU may be off in the last bit.
    return x.to(torch.float64).sqrt().to(torch.float32)


def lane_sum(x: Tensor) -> Tensor:
    """Sum of the last dimension, a multiple of 16, in the order of the format."""
    parts = x.unflatten(-1, (-1, 16))
    lanes = parts[..., 0, :]
    for i in range(1, parts.shape[-2]):
        lanes = lanes + parts[..., i, :]
    for width in (8, 4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width:]
    return lanes[..., 0]


def token_sum(x: Tensor) -> Tensor:
    """Sum of dimension -2, a power of two, in the order of the format."""
    while (half := x.shape[-2] // 2) > 0:
        x = x[..., :half, :] + x[..., half:, :]
    return x[..., 0, :]


def key_balance(key: Tensor) -> Tensor:
    """Balance of the key channels from the first 192 tokens.

    Args:
        key: ``[batch, kv_heads, tokens, dim]``, float32, float16 or bfloat16.

    Returns:
        float32 ``[batch, kv_heads, dim]``.
    """
    _checks.check_key(key)
    if key.shape[2] == 0:
        raise ValueError(f"key must hold at least one token, got shape {tuple(key.shape)}")
    k = read_input(key[..., : formats.BALANCE_TOKENS, :])
    tokens = k.shape[-2]
    mean = token_sum(_pad_tokens(k)) / tokens
    deviation = k - mean.unsqueeze(-2)
    variance = token_sum(_pad_tokens(deviation * deviation)) / tokens
    floor = lane_sum(variance) / key.shape[-1] * formats.VARIANCE_FLOOR
    floor = floor.unsqueeze(-1)
    balance = 1 / square_root(square_root(torch.maximum(variance, floor)))
    return torch.where(floor > 0, balance, torch.ones_like(balance))


def _pad_tokens(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, formats.BALANCE_FOLD - x.shape[-2]))


def quantize_tile(
    key: Tensor, value: Tensor, balance: Tensor, key_bits: int, value_bits: int
) -> Tensor:
    """Encode tiles of 64 tokens into records.

    Args:
        key: ``[tiles, kv_heads, 64, key_dim]``, float32, float16 or bfloat16.
        value: ``[tiles, kv_heads, 64, value_dim]`` in the same dtype.
        balance: float32 ``[tiles or 1, kv_heads, key_dim]``.
        key_bits: 2, 3 or 4, or 16.
        value_bits: 2, 3 or 4, or 16.

    Returns:
        uint8 ``[tiles, kv_heads, record_bytes]``.
    """
    layout = _checks.check_tile_input(key, value, balance, key_bits, value_bits)
    if layout.is_pass_through:
        return _join_record([to_bytes(key), to_bytes(value)], layout)
    mean, mean_scale = key_mean(key)
    key_scale, key_codes = encode_keys(key, balance, mean, mean_scale, key_bits)
    value_scale, value_codes = encode_values(value, value_bits)
    parts = [
        to_bytes(key_scale),
        packing.pack(key_codes, "key", key_bits),
        to_bytes(value_scale),
        packing.pack(value_codes, "value", value_bits),
        to_bytes(mean),
        to_bytes(mean_scale),
    ]
    return _join_record(parts, layout)


def to_bytes(x: Tensor) -> Tensor:
    """Bytes of every tile: ``[tiles, kv_heads, ...]`` to uint8 ``[tiles, kv_heads, n]``."""
    return x.reshape(*x.shape[:2], math.prod(x.shape[2:])).contiguous().view(torch.uint8)


def _join_record(parts: list[Tensor], layout: formats.TileFormat) -> Tensor:
    record = torch.cat(parts, -1)
    return torch.nn.functional.pad(record, (0, layout.record_bytes - record.shape[-1]))


def key_mean(key: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of tiles of keys as int8 ``[..., dim]`` and its scale, float16 ``[..., 1]``."""
    return quantized_mean(read_input(key))


def quantized_mean(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of dimension -2, 64 tokens, as int8 ``[..., dim]`` and its scale ``[..., 1]``."""
    mean = token_sum(x) * (1 / formats.TILE_TOKENS)
    scale = (mean.abs().amax(-1, keepdim=True) / 127).to(torch.float16)
    divisor = scale.to(torch.float32)
    steps = torch.where(divisor > 0, mean / divisor, torch.zeros_like(mean))
    return steps.round().clamp(-127, 127).to(torch.int8), scale


def encode_keys(
    key: Tensor, balance: Tensor, mean: Tensor, mean_scale: Tensor, bits: int
) -> tuple[Tensor, Tensor]:
    """Encode keys ``[..., tokens, dim]`` under the mean of their tile ``[..., dim]``.

    Returns:
        float16 scales ``[..., tokens]`` and uint8 codes ``[..., tokens, dim]``.
    """
    offset = mean.to(torch.float32) * mean_scale.to(torch.float32)
    balanced = (read_input(key) - offset.unsqueeze(-2)) * balance.unsqueeze(-2)
    signs = formats.signs("key", key.shape[-1]).to(key.device)
    return encode_rotated(hadamard.transform(balanced * signs), bits)


def encode_values(value: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Encode values ``[..., tokens, dim]``; see `encode_keys` for the result."""
    signs = formats.signs("value", value.shape[-1]).to(value.device)
    return encode_rotated(hadamard.transform(read_input(value) * signs), bits)


def levels(bits: int, device: torch.device) -> Tensor:
    """Codebook, float32 ``[2 ** bits]``."""
    return torch.tensor(formats.LEVELS[bits], dtype=torch.float32, device=device)


def encode_rotated(z: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes and scale of rotated vectors: the candidate with the largest projection wins."""
    codebook = levels(bits, z.device)
    midpoints = (codebook[1:] + codebook[:-1]) / 2
    sigma = torch.tensor(formats.LEVELS_PER_SIGMA[bits], dtype=torch.float32, device=z.device)
    rms = square_root(lane_sum(z * z) / z.shape[-1])
    best = torch.full_like(rms, -1)
    best_scale = torch.zeros_like(rms)
    best_codes = torch.zeros_like(z, dtype=torch.uint8)
    for candidate in formats.SCALE_CANDIDATES:
        factor = sigma / (rms * candidate)
        u = torch.where(rms.unsqueeze(-1) > 0, z * factor.unsqueeze(-1), torch.zeros_like(z))
        codes = torch.bucketize(u, midpoints, right=True)
        c = codebook[codes]
        projection, norm = lane_sum(z * c), (c * c).sum(-1)
        gain = projection * projection / norm
        better = gain > best
        best = torch.where(better, gain, best)
        best_scale = torch.where(better, projection / norm, best_scale)
        best_codes = torch.where(better.unsqueeze(-1), codes.to(torch.uint8), best_codes)
    scale = torch.where(rms > 0, best_scale, torch.zeros_like(rms))
    return scale.clamp(max=_HALF_MAX).to(torch.float16), best_codes
