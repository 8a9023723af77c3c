"""`KVQCache` for Transformers. Importing this module teaches Transformers about packed caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from transformers.cache_utils import CacheLayerMixin

from torch_kvq.cache import aliases
from torch_kvq.cache.options import LayerOptions
from torch_kvq.cache.packed import PackedLayer
from torch_kvq.cache.policy import LayerPolicy
from torch_kvq.integrations import transformers_attention, transformers_generate
from torch_kvq.integrations.transformers_layout import TransformersCache


class KVQCache(TransformersCache):
    """A Transformers cache that is packed and attended while it stays packed.

    Hand it to ``generate`` or to a model's forward call. Attention over the prompt is the model's
    own, on exact keys and values; later steps read the packed cache, whichever attention
    implementation the model uses. ``attn_implementation="kvq"`` is one more.

    Layers with full attention are packed, and in a cache that grows those with a sliding window of
    more than ``residual_length + 64`` tokens. Shorter windows, linear and latent attention and head
    dims that are not a multiple of 16 from 32 to 512 keep Transformers' own layers, when ``config``
    is given or ``generate`` is used; the logger ``torch_kvq`` says so at level INFO.

    Args:
        bits: 2, 3, 4, 16 (pass-through) or a text like ``"4/3"``, keys first.
        key_bits: bits of the keys, overrides ``bits``.
        value_bits: bits of the values, overrides ``bits``; at most ``key_bits``.
        sink_tokens: first tokens of a sequence that stay exact.
        residual_length: recent tokens that stay exact; up to 63 more do.
        quantized_start: tokens up to which nothing is packed.
        max_cache_len: positions to allocate at once, for graphs that are compiled; the cache grows
            when not given.
        static: allocate at once; without ``max_cache_len`` for as much as ``generate`` asks for.
        config: configuration of the model, for a cache that is not handed to ``generate``.
        strict: raise a RuntimeError where keys or values would have to be decoded, for a model
            that does not use Transformers' attention functions; else `materialized` counts these.
        skip_layers: layers that keep Transformers' own, such as ``(0, -1)``; negative ones count
            from the last and need ``generate`` or ``config``.
        layer_bits: bits of single layers in the place of ``bits``, such as ``{0: 4, 1: "4/3"}``;
            they change nothing for a layer that is not packed.
        **unknown: nothing else is accepted; a TypeError says what the names of other caches are
            called here.

    Raises:
        ValueError: an option outside the above, or a layer that the model does not have.
        TypeError: an option of another type.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=128, intermediate_size=128, num_attention_heads=4, vocab_size=100,
        ...     num_hidden_layers=2, num_key_value_heads=2, eos_token_id=None, pad_token_id=0))
        >>> cache = KVQCache(bits=4)
        >>> _ = model.generate(torch.ones(1, 300, dtype=torch.long), past_key_values=cache,
        ...                    max_new_tokens=5, do_sample=False)
        >>> cache
        KVQCache(bits=4, layers=2, tokens=304, bytes=164144)
        >>> cache.materialized
        0
    """

    def __init__(
        self,
        bits: int | str = 4,
        *,
        key_bits: int | None = None,
        value_bits: int | None = None,
        sink_tokens: int = 4,
        residual_length: int = 64,
        quantized_start: int = 256,
        max_cache_len: int | None = None,
        static: bool = False,
        config: Any = None,
        strict: bool = False,
        skip_layers: Sequence[int] = (),
        layer_bits: Mapping[int, int | str] | None = None,
        **unknown: NoReturn,
    ) -> None:
        install()
        aliases.refuse(unknown)
        self._set_up(
            LayerOptions.parse(
                bits,
                key_bits=key_bits,
                value_bits=value_bits,
                sink_tokens=sink_tokens,
                residual_length=residual_length,
                quantized_start=quantized_start,
                max_cache_len=max_cache_len,
                strict=strict,
            ),
            LayerPolicy.parse(skip_layers, layer_bits),
            static,
            config,
        )


def install() -> None:
    """Teach Transformers about packed caches; repeated calls find new attention functions."""
    transformers_attention.install()
    CacheLayerMixin.register(PackedLayer)
    transformers_generate.install(TransformersCache)


install()
