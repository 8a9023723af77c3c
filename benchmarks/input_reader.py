"""A model whose prompt every cache has as the model has read it, caches of layer inputs too."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from torch_kvq import KVQCache, XQuantCache
from torch_kvq.cache.x_source import Staged
from torch_kvq.formats import QUANTIZED, TILE_TOKENS

from .model import continuation, filled
from .recipes import RULE, Recipe, Window
from .trial import Divergence, Trial

RESIDUAL = 128
"""Recent tokens that every cache keeps exact, and up to 63 more."""

CUTS = (0,)
"""Tokens, modulo 64, after which a cache of layer inputs packs: after their attention."""

SINKS = RULE["sink_tokens"]

KVQ_CUTS = (SINKS - 1, SINKS)
"""The same for `KVQCache`, whose first tokens stay exact: it packs ahead of the attention."""

CROSS = {"first_layers": 3, "accumulator_bits": 4}
"""Options of the mode ``"cl"``."""

EXACT = "DynamicCache"
"""What the tables call the uncompressed cache."""


def input_cache(bits: int, mode: str, **options: int) -> str:
    """What the tables call a cache of layer inputs.

    Example:
        >>> input_cache(2, "cl", first_layers=1)
        "XQuantCache(2, mode='cl', first_layers=1)"
    """
    more = "".join(f", {name}={value}" for name, value in options.items())
    return f"XQuantCache({bits}, {mode=}{more})"


def packed_cache(bits: int) -> str:
    """What the tables call a cache of packed keys and values."""
    return f"KVQCache({bits}, residual_length={RESIDUAL})"


def expanded(model: Any) -> Any:
    """The same model with a key and a value head for every query head.

    Args:
        model: a Llama without biases, which no cache of layer inputs is bound to. All weights but
            those of the keys and values are shared with it.
    """
    own = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    config = own.config
    shared = config.num_attention_heads // config.num_key_value_heads
    config.num_key_value_heads = config.num_attention_heads
    for layer in own.model.layers:
        attention = layer.self_attn
        attention.num_key_value_groups = 1
        for projection in (attention.k_proj, attention.v_proj):
            heads = projection.weight.unflatten(0, (-1, attention.head_dim))
            weight = heads.repeat_interleave(shared, 0).flatten(0, 1)
            projection.weight = nn.Parameter(weight, requires_grad=False)
            projection.out_features = len(weight)
    return own


class _Recorder(XQuantCache):
    """A lossless cache that notes what it is given."""

    def __init__(self, model: Any) -> None:
        self.inputs: dict[int, Staged] = {}
        super().__init__(16, mode="x", model=model)

    def stage(self, index: int, staged: Staged) -> None:
        """Take the input of a layer."""
        self.inputs[index] = staged
        super().stage(index, staged)


def recorded(model: Any, ids: Tensor) -> list[Staged]:
    """What the attention modules of a model are given while it reads ``ids``."""
    cache = _Recorder(model)
    model(ids, past_key_values=cache, logits_to_keep=1)
    return [staged for _, staged in sorted(cache.inputs.items())]


@dataclass(frozen=True)
class Reader:
    """A model and a prompt that every cache has as the model has read it, exactly.

    Attributes:
        trial: keys and values of the prompt, the continuation and its exact predictions.
        inputs: what the attention modules were given for the prompt.
    """

    trial: Trial
    inputs: list[Staged]

    @classmethod
    def of(cls, model: Any, ids: Tensor, past: int) -> Reader:
        """Read ``past`` tokens exactly; the rest is the continuation."""
        return cls(Trial.read(model, ids, past), recorded(model, ids[:, :past]))

    def with_heads(self, model: Any) -> Reader:
        """The same for the model that `expanded` makes."""
        shared = model.config.num_attention_heads // self.trial.tokens[0][0].shape[1]
        tokens = [
            (key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1))
            for key, value in self.trial.tokens
        ]
        return replace(self, trial=replace(self.trial, model=model, tokens=tokens))

    @property
    def past(self) -> int:
        """Tokens of the prompt."""
        return self.trial.tokens[0][0].shape[2]

    @property
    def fp16_bytes(self) -> int:
        """Bytes of a token's keys and values in float16."""
        return sum(2 * x[:, :, 0].numel() for pair in self.trial.tokens for x in pair)

    def filled(self, cache: Any) -> Any:
        """A cache of layer inputs with the prompt, packed as after the attention to it."""
        for index, (staged, tokens) in enumerate(zip(self.inputs, self.trial.tokens, strict=True)):
            cache.stage(index, staged)
            cache.layers[index].update(*tokens)
        cache.flush()
        return cache

    def row(
        self, name: str, cache: Any, sizes: tuple[float, float], cuts: Collection[int] = CUTS
    ) -> dict[str, Any]:
        """What a cache with the prompt does to the continuation.

        Args:
            name: of the cache.
            cache: with the prompt.
            sizes: bytes of a packed token, and per token in all.
            cuts: tokens, modulo 64, at which calls end, as those between find the same tokens
                packed.
        """
        trial = self.trial
        calls = call_sizes(self.past, trial.ids.shape[1], cuts)
        logits = continuation(trial.model, cache, trial.ids, calls)
        found = Divergence.of(logits, trial.exact, trial.ids[0, 1:])
        return {
            "name": name,
            "packed": sizes[0],
            "bytes": sizes[1],
            "ratio": self.fp16_bytes / sizes[1],
            "mean": found.mean,
            "median": found.median,
            "agreement": found.agreement,
        }

    def input_row(self, bits: int, mode: str, **options: int) -> dict[str, Any]:
        """A cache of layer inputs; ``"cl"`` has the options `CROSS` besides."""
        given: dict[str, Any] = (CROSS if mode == "cl" else {}) | options
        cache = self.filled(XQuantCache(bits, mode=mode, model=self.trial.model, **given))
        sizes = cache.bytes_per_token[mode], self._in_all(cache)
        return self.row(input_cache(bits, mode, **options), cache, sizes)

    def packed_row(self, bits: int) -> dict[str, Any]:
        """A cache of packed keys and values."""
        cache = filled(KVQCache(bits, residual_length=RESIDUAL), self.trial.tokens)
        parts = cache.memory_report().parts
        tokens = int(cache.layers[0].state.lengths[0, QUANTIZED])
        packed = (parts["tiles"] + parts["block table"]) / tokens
        sizes = packed, self._in_all(cache)
        return self.row(packed_cache(bits), cache, sizes, KVQ_CUTS)

    def recipe_row(self, recipe: Recipe) -> dict[str, Any]:
        """A recipe with as many exact tokens as a cache of layer inputs has.

        It is counted without a byte to spare, unlike the caches, whose room is really allocated.
        """
        window = Window(f"last {RESIDUAL} to {RESIDUAL + TILE_TOKENS - 1}", 0, _packed, _packed)
        cache = filled(recipe.cache(window), self.trial.tokens)
        packed = self.fp16_bytes * recipe.bits / 16
        rounded = cache.layers[0].rounded_keys / self.past
        sizes = packed, packed * rounded + self.fp16_bytes * (1 - rounded)
        return self.row(recipe.name, cache, sizes)

    def exact_row(self) -> dict[str, Any]:
        """The uncompressed cache."""
        from transformers import DynamicCache

        cache = filled(DynamicCache(), self.trial.tokens)
        return self.row(EXACT, cache, (self.fp16_bytes, self.fp16_bytes))

    def _in_all(self, cache: Any) -> float:
        """Bytes per token of all that is allocated, exact tokens in 16 bits."""
        saved = 1 - 2 / self.trial.tokens[0][0].element_size()
        report = cache.memory_report()
        total: float = report.total_bytes
        for layer, parts in zip(cache.layers, report.by_layer, strict=True):
            tails = getattr(layer.state, "tails", None)
            # The first layer may hold token numbers, which are no wider than they have to be.
            if tails is None or tails[0].is_floating_point():
                total -= saved * parts["exact"]
        return total / self.past


def _packed(held: int, new: int, prompt: int) -> int:
    """Tokens that a cache of layer inputs has packed when ``new`` ones come."""
    return max(held - RESIDUAL, 0) // TILE_TOKENS * TILE_TOKENS


def call_sizes(past: int, new: int, cuts: Collection[int]) -> list[int]:
    """Tokens of calls that end where the tokens in all are among ``cuts``, modulo 64.

    Example:
        >>> call_sizes(1924, 128, (0,))
        [60, 64, 4]
    """
    ends = [end for end in range(past + 1, past + new) if end % TILE_TOKENS in cuts]
    return [end - begin for begin, end in pairwise([past, *ends, past + new])]
