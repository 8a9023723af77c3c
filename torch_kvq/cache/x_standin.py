"""Stop-gap for the operators on layer inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
