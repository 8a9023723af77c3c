"""`KVQCache` for Transformers. Importing this module teaches Transformers about packed caches."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
)

from torch_kvq import formats
from torch_kvq.cache.cache import CacheCore
from torch_kvq.cache.layer import KVQLayer
from torch_kvq.cache.options import LayerOptions
from torch_kvq.cache.protocol import CacheLayer
from torch_kvq.integrations import transformers_attention, transformers_generate

_log = logging.getLogger("torch_kvq")

# For layers that use the keys of another one; older releases leave them out of the cache.
_DUMMY = getattr(cache_utils, "DummyLayer", ())


# A DynamicCache, because EncoderDecoderCache crops and selects rows of nothing else.
class KVQCache(CacheCore, DynamicCache):
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
        self._set_options(
            bits,
            key_bits,
            value_bits,
            sink_tokens,
            residual_length,
            quantized_start,
            max_cache_len,
            static,
            strict,
            skip_layers,
            layer_bits,
            unknown,
        )
        self._fits_itself = static and max_cache_len is None
        Cache.__init__(self, layers=[])
        if config is not None and not self._fits_itself:
            self._lay_out(config)

    def bind(self, model: Any, max_length: int | None = None) -> None:
        """Take the layers of a model; ``generate`` does this by itself.

        Args:
            model: a Transformers model.
            max_length: positions to come; a cache with ``static=True`` alone makes room for them.

        Raises:
            ValueError: the cache holds tokens of a model with another number of layers.
        """
        holds_tokens = self.holds_tokens
        if holds_tokens:
            layers = _template(decoder_config(model.config), None)
            # A cache that was not laid out has no layers behind the last that stores anything.
            while not self._is_laid_out and layers and isinstance(layers[-1], _DUMMY):
                layers.pop()
            if len(layers) != len(self.layers):
                raise ValueError(
                    f"the cache holds tokens of a model with {len(self.layers)} layers, got one "
                    f"with {len(layers)}: call reset() before it is used for another"
                )
        if self._fits_itself and max_length is not None:
            self._make_room(max_length)
        if not holds_tokens:
            self._lay_out(model.config)

    def _make_room(self, max_length: int) -> None:
        held = self.options.max_cache_len or 0
        needed = -(-max_length // formats.TILE_TOKENS) * formats.TILE_TOKENS
        if needed <= held:
            return
        if self.holds_tokens and len(self.packed_layers) < len(self.layers):
            raise ValueError(
                f"max_cache_len={held} is too small for {max_length} positions and layers of "
                "Transformers cannot grow: give the cache max_cache_len"
            )
        self.options = self.options.with_max_cache_len(needed)
        for layer in self.packed_layers:
            layer.resize(needed)

    def _lay_out(self, config: Any) -> None:
        """Take the layers that Transformers makes, with packed ones where that can be."""
        config = decoder_config(config)
        layers = _template(config, self.options.max_cache_len)
        configs = config.per_layer_config[: len(layers)]
        options = self.policy.resolve(self.options, len(layers))
        reasons = [
            _reason(layer, own, self.options) or ("skip_layers" if chosen is None else None)
            for layer, own, chosen in zip(layers, configs, options, strict=True)
        ]
        _keep_sliding_together(layers, reasons)
        held = self.layers if len(self.layers) == len(layers) else layers
        before = [isinstance(layer, CacheLayer) for layer in held]
        # A packed layer that is there already may have options of its own.
        self.layers = [
            new
            if reason
            else old
            if isinstance(old, CacheLayer)
            else self._new_layer(_with_window(chosen, new))
            for new, old, reason, chosen in zip(layers, held, reasons, options, strict=True)
        ]
        if not self._is_laid_out or before != [reason is None for reason in reasons]:
            self._log_layout(Counter(reason for reason in reasons if reason))
        self._is_laid_out = True

    def _skipped(self) -> Any:
        held = self.options.max_cache_len
        return DynamicLayer() if held is None else StaticLayer(max_cache_len=held)

    def _log_layout(self, others: Counter[str]) -> None:
        packed = self.packed_layers
        _log.log(
            logging.INFO if packed else logging.WARNING,
            "%d of %d layers are packed%s%s",
            len(packed),
            len(self.layers),
            _bits_of(packed),
            "".join(f"; {count} not: {reason}" for reason, count in others.items()),
        )


def _bits_of(layers: list[KVQLayer]) -> str:
    counts = Counter(layer.options.bits for layer in layers)
    if len(counts) < 2:
        return "".join(f" at {bits} bits" for bits in counts)
    return " at " + " and ".join(f"{bits} bits ({count})" for bits, count in counts.items())


def _template(config: Any, max_cache_len: int | None) -> list[Any]:
    if max_cache_len is None:
        return DynamicCache(config=config).layers
    return StaticCache(config=config, max_cache_len=max_cache_len).layers


def _is_sliding(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False))


def _with_window(options: LayerOptions | None, layer: Any) -> LayerOptions | None:
    """Options with the sliding window of Transformers' layer, if it has one."""
    if options is None or not _is_sliding(layer):
        return options
    return options.with_sliding_window(layer.sliding_window)


def _keep_sliding_together(layers: list[Any], reasons: list[str | None]) -> None:
    """Leave no sliding layer packed beside one that is not: their common mask is made for one."""
    sliding = [index for index, layer in enumerate(layers) if _is_sliding(layer)]
    if any(reasons[index] for index in sliding):
        for index in sliding:
            reasons[index] = reasons[index] or "sliding window beside one that is not packed"


def decoder_config(config: Any) -> Any:
    """The part of a model's configuration that its cache is laid out by."""
    return config.get_text_config(decoder=True)


def head_dims(config: Any) -> tuple[int, int]:
    """Channels of a key and of a value, from the configuration of a layer."""
    dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None)
    dim = dim or config.hidden_size // config.num_attention_heads
    return dim, getattr(config, "v_head_dim", None) or dim


def _reason(layer: Any, config: Any, options: LayerOptions) -> str | None:
    """Why a layer is not packed, None when it is."""
    is_long = type(layer) is DynamicSlidingWindowLayer and options.fits_sliding_window(
        layer.sliding_window
    )
    if _is_sliding(layer) and not is_long:
        return "sliding window"
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return "linear attention"
    if isinstance(layer, _DUMMY):
        return "no keys of its own"
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer):
        return f"Transformers' {type(layer).__name__}"
    if getattr(config, "kv_lora_rank", None) is not None:
        return "latent attention"
    for dim in head_dims(config):
        try:
            formats.check_head_dim("head_dim", dim)
        except ValueError as error:
            return str(error)
    return None


def install() -> None:
    """Teach Transformers about packed caches; repeated calls find new attention functions."""
    transformers_attention.install()
    CacheLayerMixin.register(CacheLayer)
    transformers_generate.install(KVQCache)


install()
