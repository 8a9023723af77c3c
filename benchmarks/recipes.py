"""A simpler way to round keys and values, to show what the format's extra steps are for."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from torch_kvq import formats, fwht

RULE = {"sink_tokens": 4, "residual_length": 64, "quantized_start": 256}
"""Which tokens stay exact: the defaults of `torch_kvq.KVQCache`."""


def plain_rotation(x: Tensor, kind: Literal["key", "value"], bits: int) -> Tensor:
    """Round to Lloyd-Max codes after a rotation: no balance, no mean, no searched scale.

    Args:
        x: ``[..., dim]``.
        kind: chooses the signs of the rotation.
        bits: 2, 3 or 4.

    Returns:
        The rounded ``x``.
    """
    signs = formats.signs(kind, x.shape[-1])
    levels = x.new_tensor(formats.LEVELS[bits])
    rotated = fwht(x, signs)
    rms = rotated.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
    middles = (levels[1:] + levels[:-1]) / 2
    codes = levels[torch.bucketize(rotated / rms * formats.LEVELS_PER_SIGMA[bits], middles)]
    scale = (rotated * codes).sum(-1, keepdim=True) / codes.square().sum(-1, keepdim=True)
    return fwht(scale * codes, signs, inverse=True)


class PlainRotationLayer(DynamicLayer):
    """Layer of Transformers that rounds the tokens that `KVQCache` would pack, and no others."""

    keys: Tensor
    values: Tensor
    bits = 4
    quantized = 0

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append; as in `KVQCache` several tokens in one call stay exact until the next one."""
        keys, _ = super().update(key, value, *args, **kwargs)
        new = key.shape[2] if key.shape[2] > 1 else 0
        due = formats.quantized_tokens(keys.shape[2] - new, self.quantized, **RULE)
        if due > self.quantized:
            self.keys = self._rounded(self.keys, "key", due)
            self.values = self._rounded(self.values, "value", due)
            self.quantized = due
        return self.keys, self.values

    def _rounded(self, x: Tensor, kind: Literal["key", "value"], due: int) -> Tensor:
        sinks = RULE["sink_tokens"]
        new = slice(sinks + self.quantized, sinks + due)
        result = x.clone()
        result[:, :, new] = plain_rotation(x[:, :, new], kind, self.bits)
        return result


def plain_rotation_cache(bits: int) -> Cache:
    """Cache whose layers round with `plain_rotation`."""
    layer = type("Layer", (PlainRotationLayer,), {"bits": bits})
    return Cache(layer_class_to_replicate=layer)
