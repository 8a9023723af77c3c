"""Other ways to round keys and values, in plain PyTorch, to compare with the format of a tile.

Each recipe quantises and dequantises at once; where it comes from is said at its function. Scales
and minima are stored in float16, as by all of them in a float16 model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from torch_kvq import formats, fwht

RULE = {"sink_tokens": 4, "residual_length": 64, "quantized_start": 256}
"""Which tokens stay exact: the defaults of `torch_kvq.KVQCache`."""

FLOAT16_BITS = 16


@dataclass(frozen=True)
class Window:
    """Which tokens a cache rounds.

    Attributes:
        exact: the tokens that it keeps exact, in words.
        first: number of first tokens that are never rounded.
        key: ``(held, new, prompt)`` to how many of the oldest keys are rounded when a call attends
            to ``held`` tokens and ``new`` ones of its own, after a first call of ``prompt`` tokens.
        value: the same for values.
    """

    exact: str
    first: int
    key: Callable[[int, int, int], int]
    value: Callable[[int, int, int], int]


def _as_packed(held: int, new: int, prompt: int) -> int:
    tokens = held + (new if new == 1 else 0)
    return RULE["sink_tokens"] + formats.quantized_tokens(tokens, 0, **RULE)


def _all(held: int, new: int, prompt: int) -> int:
    return held + new


def _full_blocks(held: int, new: int, prompt: int, block: int = 128) -> int:
    return held - held % block


def _all_but_last(held: int, new: int, prompt: int, last: int = 128) -> int:
    return max(0, held - last)


def _prompt_and_blocks(held: int, new: int, prompt: int, block: int = 128) -> int:
    return prompt + (held - prompt) // block * block if held else 0


SAME = Window("first 4, last 64 to 127", RULE["sink_tokens"], _as_packed, _as_packed)
"""The tokens that `KVQCache` packs; several in one call stay exact until the next call."""

NONE_EXACT = Window("none", 0, _all, _all)
"""llama.cpp and vLLM write a token's rounded form before it is attended to."""

KIVI_WINDOW = Window("keys last 0 to 127, values last 128", 0, _full_blocks, _all_but_last)
"""KIVI with a residual of 128: ``models/llama_kivi.py`` of https://github.com/jy-yuan/KIVI."""

QUANTO_WINDOW = Window("last 0 to 127, none of the prompt", 0, *[_prompt_and_blocks] * 2)
"""``QuantizedLayer.update`` of Transformers with its default, ``residual_length=128``.

It rounds everything anew whenever 128 tokens are due; what is on the grid already stays there.
"""


@dataclass(frozen=True)
class Recipe:
    """A way to round.

    Attributes:
        name: what the report calls it.
        bits: stored per value, scales and minima included, for a head dimension of 64.
        key: rounds ``[..., tokens, dim]``.
        value: rounds ``[..., tokens, dim]``.
        window: the tokens that stay exact where the recipe comes from.
    """

    name: str
    bits: float
    key: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]
    window: Window

    def cache(self, window: Window | None = None) -> Cache:
        """An empty cache that rounds so.

        Args:
            window: other tokens to keep exact than those of the recipe.
        """
        attributes = {"recipe": self, "window": window or self.window}
        layer = type("Layer", (RoundingLayer,), attributes)
        return Cache(layer_class_to_replicate=layer)


class RoundingLayer(DynamicLayer):
    """Layer of Transformers that rounds its tokens when they are due."""

    keys: Tensor
    values: Tensor
    recipe: Recipe
    window: Window
    prompt = rounded_keys = rounded_values = 0

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Append, and give all tokens as attention is to see them."""
        counts = (self.get_seq_length(), key.shape[2])
        super().update(key, value, *args, **kwargs)
        self.prompt = self.prompt or key.shape[2]
        self.rounded_keys = self._round(
            self.keys, self.recipe.key, self.rounded_keys, self.window.key(*counts, self.prompt)
        )
        self.rounded_values = self._round(
            self.values,
            self.recipe.value,
            self.rounded_values,
            self.window.value(*counts, self.prompt),
        )
        return self.keys, self.values

    def flush(self) -> None:
        """Round what would be due at the next call."""
        self.update(self.keys[:, :, :0], self.values[:, :, :0])

    def _round(self, x: Tensor, rounding: Callable[[Tensor], Tensor], done: int, due: int) -> int:
        """Round up to token ``due`` in place, what `DynamicLayer` has just copied."""
        new = slice(max(done, self.window.first), due)
        if new.start < new.stop:
            x[:, :, new] = rounding(x[:, :, new])
        return max(done, due)


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


def min_max(x: Tensor, bits: int) -> Tensor:
    """Round the last dimension to evenly spaced levels from its minimum to its maximum."""
    low, high = x.aminmax(dim=-1, keepdim=True)
    most = 2**bits - 1
    scale = ((high - low) / most).half().float().clamp_min(torch.finfo(torch.half).smallest_normal)
    low = low.half().float()
    return ((x - low) / scale).round().clamp(0, most) * scale + low


def kivi_key(x: Tensor, bits: int, group: int = 32) -> Tensor:
    """Each channel of 32 tokens, from minimum to maximum.

    Source: KIVI, arXiv 2402.02750 (keys per channel, groups of 32), and ``quant_and_pack_kcache``
    in ``quant/new_pack.py`` of https://github.com/jy-yuan/KIVI.
    """
    groups = x.unflatten(-2, (-1, group)).transpose(-1, -2)
    return min_max(groups, bits).transpose(-1, -2).flatten(-3, -2)


def kivi_value(x: Tensor, bits: int, group: int = 32) -> Tensor:
    """Each 32 channels of a token, from minimum to maximum; ``quant_and_pack_vcache`` there."""
    return min_max(x.unflatten(-1, (-1, group)), bits).flatten(-2)


def quanto(x: Tensor, bits: int, group: int = 64) -> Tensor:
    """Each 64 values in memory, from minimum to maximum.

    Source: ``QuantoQuantizedLayer`` of Transformers (``axis_key=0``, ``axis_value=0``,
    ``q_group_size=64``), whose ``MaxOptimizer`` and ``group`` are those of
    https://github.com/huggingface/optimum-quanto: with axis 0 a tensor is cut into rows of 64
    values as it lies in memory, so that a group is a part of one token's vector.
    """
    return min_max(x.unflatten(-1, (-1, group)), bits).flatten(-2)


def q8_0(x: Tensor, block: int = 32) -> Tensor:
    """Blocks of 32 channels, -127 to 127 times a float16 scale.

    Source: ``quantize_row_q8_0_ref`` in ``ggml/src/ggml-quants.c`` of
    https://github.com/ggml-org/llama.cpp; its ``--cache-type-k`` and ``-v`` take this name.
    """
    blocks = x.unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * torch.where(scale == 0, 0.0, 1 / scale)
    codes = torch.copysign((scaled.abs() + 0.5).floor(), scaled)
    return (codes * scale.half().float()).flatten(-2)


def q4_0(x: Tensor, block: int = 32) -> Tensor:
    """Blocks of 32 channels, -8 to 7 times a float16 scale that puts the greatest one at -8.

    Source: ``quantize_row_q4_0_ref`` there; its ``--cache-type-k`` and ``-v`` take this name.
    """
    blocks = x.unflatten(-1, (-1, block))
    greatest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = greatest / -8
    codes = (blocks * torch.where(scale == 0, 0.0, 1 / scale) + 8.5).trunc().clamp(0, 15) - 8
    return (codes * scale.half().float()).flatten(-2)


def fp8(x: Tensor) -> Tensor:
    """Float8 E4M3 with a scale of 1 for the whole tensor; what is too large is cut off.

    Source: ``kv_cache_dtype="fp8"`` of vLLM without calibration, whose scales are 1:
    https://docs.vllm.ai/en/latest/features/quantization/quantized_kvcache/.
    """
    most = torch.finfo(torch.float8_e4m3fn).max
    return x.clamp(-most, most).to(torch.float8_e4m3fn).float()


def _rotation(bits: int) -> Recipe:
    key, value = (partial(plain_rotation, kind=kind, bits=bits) for kind in ("key", "value"))
    return Recipe(f"plain rotation, {bits} bits", bits + FLOAT16_BITS / 64, key, value, SAME)


def _kivi(bits: int) -> Recipe:
    key, value = partial(kivi_key, bits=bits), partial(kivi_value, bits=bits)
    return Recipe(f"KIVI, {bits} bits", bits + 2 * FLOAT16_BITS / 32, key, value, KIVI_WINDOW)


def _quanto(bits: int) -> Recipe:
    rounding = partial(quanto, bits=bits)
    stored = bits + 2 * FLOAT16_BITS / 64
    return Recipe(f"quanto int{bits}", stored, rounding, rounding, QUANTO_WINDOW)


PEERS = (
    Recipe("vLLM fp8 E4M3", 8.0, fp8, fp8, NONE_EXACT),
    Recipe("llama.cpp q8_0", 8 + FLOAT16_BITS / 32, q8_0, q8_0, NONE_EXACT),
    Recipe("llama.cpp q4_0", 4 + FLOAT16_BITS / 32, q4_0, q4_0, NONE_EXACT),
    _kivi(4),
    _kivi(2),
    _quanto(4),
    _quanto(2),
)
"""What people would use instead."""


def plain_rotation_cache(bits: int) -> Cache:
    """Cache whose layers round with `plain_rotation`."""
    return _rotation(bits).cache()
