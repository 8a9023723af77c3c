"""Layers of a Transformers cache that is packed: which are, and with which options."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from transformers import cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
    StaticLayer,
)

from torch_kvq import formats
from torch_kvq.cache.cache import CacheCore
from torch_kvq.cache.options import RowOptions
from torch_kvq.cache.packed import PackedLayer
from torch_kvq.cache.policy import LayerPolicy

_log = logging.getLogger("torch_kvq")

# For layers that use the keys of another one; older releases leave them out of the cache.
_DUMMY = getattr(cache_utils, "DummyLayer", ())


# A DynamicCache, because EncoderDecoderCache crops and selects rows of nothing else.
class TransformersCache(CacheCore, DynamicCache):
    """What packed caches have in common as caches of Transformers."""

    def _set_up(
        self, options: RowOptions, policy: LayerPolicy, static: bool = False, config: Any = None
    ) -> None:
        self._set_options(options, policy, static)
        self._fits_itself = static and options.max_cache_len is None
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
        before = [isinstance(layer, PackedLayer) for layer in held]
        # A packed layer that is there already may have options of its own.
        self.layers = [
            new
            if reason
            else old
            if isinstance(old, PackedLayer)
            else self._new_layer(_with_window(chosen, new), index)
            for index, (new, old, reason, chosen) in enumerate(
                zip(layers, held, reasons, options, strict=True)
            )
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
            _kinds_of(packed),
            "".join(f"; {count} not: {reason}" for reason, count in others.items()),
        )


def _kinds_of(layers: list[PackedLayer]) -> str:
    counts = Counter(layer.options.kind for layer in layers)
    if len(counts) < 2:
        return "".join(f" at {kind}" for kind in counts)
    return " at " + " and ".join(f"{kind} ({count})" for kind, count in counts.items())


def _template(config: Any, max_cache_len: int | None) -> list[Any]:
    if max_cache_len is None:
        return DynamicCache(config=config).layers
    return StaticCache(config=config, max_cache_len=max_cache_len).layers


def _is_sliding(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False))


def _with_window(options: Any, layer: Any) -> Any:
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


def _reason(layer: Any, config: Any, options: RowOptions) -> str | None:
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
