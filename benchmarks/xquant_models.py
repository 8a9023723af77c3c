"""Models with random weights for caches of layer inputs, and caches that are filled at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_kvq import KVQCache, XQuantCache

VOCABULARY = 1024
BITS = 4
MODES = ("x", "cl", "latent")
FIRST_LAYERS = 2
"""Layers of ``"cl"`` that store their input: the usual three are most of a small model."""

EXACT, PACKED = "DynamicCache", f"KVQCache(bits={BITS})"

_ITSELF = "itself"


@dataclass(frozen=True)
class Shape:
    """A Llama.

    Attributes:
        heads: query heads.
        kv_heads: heads of keys and values.
        layers: their number.
        dim: channels of a head.
        dtype: of the weights.
    """

    heads: int
    kv_heads: int
    layers: int
    dim: int = 64
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}/{self.dim}, {self.layers} layers"

    @property
    def channels(self) -> int:
        """Channels of a layer's input."""
        return self.heads * self.dim

    def model(self, intermediate: int) -> Any:
        """One with random weights.

        Args:
            intermediate: channels within its MLPs.
        """
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=self.channels,
            intermediate_size=intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            num_hidden_layers=self.layers,
            vocab_size=VOCABULARY,
            max_position_embeddings=1 << 16,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return LlamaForCausalLM(config).eval().to(self.dtype)


def random_ids(tokens: int) -> Tensor:
    """Random tokens, ``int64[1, tokens]``."""
    return torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(0))


def empty_caches(model: Any) -> dict[str, Callable[[], Any]]:
    """What makes each cache that takes part."""
    from transformers import DynamicCache

    def layer_inputs(mode: str) -> Callable[[], Any]:
        return lambda: XQuantCache(BITS, mode=mode, first_layers=FIRST_LAYERS, model=model)

    return {
        EXACT: lambda: DynamicCache(config=model.config),
        PACKED: lambda: KVQCache(BITS, config=model.config),
        **{name_of(mode): layer_inputs(mode) for mode in MODES},
    }


def name_of(mode: str, absorb: bool | None = None) -> str:
    """What the tables call a cache of layer inputs.

    Args:
        mode: how it stores them.
        absorb: its ``absorb_value``, None where that makes no difference.
    """
    how = "" if absorb is None else f", absorb_value={absorb}"
    return f"XQuantCache(mode={mode!r}{how})"


def with_options(cache: XQuantCache, **changes: Any) -> XQuantCache:
    """The cache, whose layers have other options from now on."""
    for layer in cache.packed_layers:
        layer.options = dataclasses.replace(layer.options, **changes)
    return cache


def fill(model: Any, cache: Any, ids: Tensor) -> Any:
    """Let a cache read a prompt in which each token attends to itself alone.

    What the cache holds and does is the same, and the time does not grow with the square of the
    tokens.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(_ITSELF, _attend_to_itself)
    model.set_attn_implementation(_ITSELF)
    model(ids, past_key_values=cache, logits_to_keep=1)
    model.set_attn_implementation("sdpa")
    return cache


def _attend_to_itself(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2), None


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds."""
    if hasattr(cache, "memory_report"):
        return int(cache.memory_report().total_bytes)
    return sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
