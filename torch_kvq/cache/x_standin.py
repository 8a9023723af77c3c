"""Stop-gap for the operators on layer inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_kvq.reference import hadamard


def record_bytes(channels: int, bits: int, axis: str, itemsize: int) -> int:
    """Bytes of a page of 64 tokens."""
    if bits == 16:
        return 64 * channels * itemsize
    return 64 * channels * bits // 8 + channels * 2


def _pack(codes: Tensor, bits: int) -> Tensor:
    flat = codes.flatten(-2).unflatten(-1, (-1, 8)).long()
    shifts = torch.arange(8, device=codes.device)
    planes = [(((flat >> bit) & 1) << shifts).sum(-1) for bit in range(bits)]
    return torch.cat(planes, -1).to(torch.uint8)


def _unpack(packed: Tensor, bits: int, channels: int) -> Tensor:
    planes = packed.unflatten(-1, (bits, -1)).long()
    shifts = torch.arange(8, device=packed.device)
    codes = sum(
        (((planes[..., bit, :, None] >> shifts) & 1) << bit).flatten(-2) for bit in range(bits)
    )
    return codes.unflatten(-1, (64, channels))


def quantize_x(x: Tensor, bits: int, axis: str = "token", rotate: bool = True) -> Tensor:
    batch, tokens, channels = x.shape
    if bits == 16:
        raw = x.contiguous().view(torch.uint8).unflatten(1, (tokens // 64, 64))
        return raw.flatten(2)
    z = x.float().unflatten(-1, (channels // 64, 64))
    if rotate:
        z = hadamard.transform(z)
    z = z.flatten(2).unflatten(1, (tokens // 64, 64))  # batch, pages, 64, channels
    groups = z.unflatten(-1, (channels // 64, 64)) if axis == "token" else z.transpose(-1, -2)
    middle = (2**bits - 1) / 2
    best, error = None, None
    for factor in (0.55, 0.7, 0.85, 1.0):
        scale = (groups.abs().amax(-1, keepdim=True) * factor / middle).clamp(min=1e-7)
        codes = (groups / scale + middle).round().clamp(0, 2**bits - 1)
        levels = codes - middle
        fit = (groups * levels).sum(-1, keepdim=True) / levels.square().sum(-1, keepdim=True)
        fit = fit.half()
        wrong = (groups - fit.float() * levels).square().sum(-1, keepdim=True)
        if best is None:
            best, error = (codes, fit), wrong
        else:
            better = wrong < error
            best = tuple(torch.where(better, new, old) for new, old in zip((codes, fit), best))
            error = torch.where(better, wrong, error)
    codes, fit = best
    codes = codes.flatten(-2) if axis == "token" else codes.transpose(-1, -2)
    return torch.cat((_pack(codes, bits), fit.flatten(2).contiguous().view(torch.uint8)), -1)


def dequantize_x(
    records: Tensor,
    channels: int,
    bits: int,
    axis: str = "token",
    rotate: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    if bits == 16:
        return records.contiguous().view(dtype).unflatten(-1, (64, channels)).flatten(1, 2)
    size = 64 * channels * bits // 8
    levels = _unpack(records[..., :size], bits, channels).float() - (2**bits - 1) / 2
    scale = records[..., size:].contiguous().view(torch.float16).float()
    if axis == "token":
        z = levels.unflatten(-1, (-1, 64)) * scale.unflatten(-1, (64, -1)).unsqueeze(-1)
        z = z.flatten(-2)
    else:
        z = levels * scale.unsqueeze(-2)
    z = z.flatten(1, 2)
    if rotate:
        z = hadamard.transform(z.unflatten(-1, (-1, 64)), inverse=True).flatten(-2)
    return z.to(dtype)


def remat(
    key_x: Tensor,
    value_x: Tensor,
    kv_heads: int,
    key_weight: Tensor,
    value_weight: Tensor,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    key_norm: Tensor | None = None,
    norm_eps: float = 0.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    key = F.linear(key_x, key_weight, key_bias).unflatten(-1, (kv_heads, -1)).transpose(1, 2)
    value = F.linear(value_x, value_weight, value_bias)
    value = value.unflatten(-1, (kv_heads, -1)).transpose(1, 2)
    if key_norm is not None:
        wide = key.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm_eps)
        key = (wide * key_norm.float()).to(key.dtype)
    if cos is not None and sin is not None:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        rotary, rest = key[..., : cos.shape[-1]], key[..., cos.shape[-1] :]
        half = cos.shape[-1] // 2
        turned = torch.cat((-rotary[..., half:], rotary[..., :half]), -1)
        key = torch.cat((rotary * cos + turned * sin, rest), -1)
    return key, value
