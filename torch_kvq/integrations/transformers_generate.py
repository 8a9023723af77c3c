"""The hook into ``generate``: packed caches get to know their model, and are made by name."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from transformers import __version__
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.utils import GenerationMixin

from torch_kvq.cache import aliases

_log = logging.getLogger("torch_kvq")

_HOOKED = "_prepare_cache_for_generation"
BACKENDS = {"kvq": "KVQCache", "kvq-tiered": "TieredCache", "kvq-x": "XQuantCache"}
"""Classes of `torch_kvq` by what ``cache_config`` calls them."""

_NEEDED = ("generation_config", "model_kwargs", "max_cache_length")

_warned: list[str] = []


def install(packed_type: type[Any]) -> None:
    """Let ``generate`` bind packed caches to its model; repeated calls change nothing.

    A release of Transformers whose ``generate`` works otherwise is left as it is, with one warning.

    Args:
        packed_type: the class of all packed caches.
    """
    prepare = getattr(GenerationMixin, _HOOKED, None)
    if hasattr(prepare, "_kvq_original"):
        return
    if prepare is not None and _names(prepare).issuperset(_NEEDED):
        setattr(GenerationMixin, _HOOKED, _binding(prepare, packed_type))
    elif not _warned:
        _warned.append(__version__)
        _log.warning(
            "generate() of transformers %s is not known and does not tell a KVQCache its model: "
            "give the cache config=model.config, and max_cache_len if it is static; "
            "cache_config={'backend': 'kvq'} has no effect",
            __version__,
        )


def _names(function: Callable[..., Any] | None) -> set[str]:
    return set() if function is None else set(inspect.signature(function).parameters)


def _binding(prepare: Callable[..., Any], packed_type: type[Any]) -> Callable[..., Any]:
    """``_prepare_cache_for_generation`` that binds a packed cache to the model."""
    signature = inspect.signature(prepare)

    @functools.wraps(prepare)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        generation_config, model_kwargs = given["generation_config"], given["model_kwargs"]
        name, cache = _given_cache(model_kwargs)
        if cache is None and _asks_for_packed(generation_config):
            cache = _cache_by_name(generation_config.cache_config)
            generation_config.cache_implementation = generation_config.cache_config = None
        if isinstance(cache, packed_type):
            model_kwargs[name] = _beside_cross_attention(self, cache)
        own = getattr(cache, "self_attention_cache", cache)
        if isinstance(own, packed_type):
            own.bind(self, given["max_cache_length"])
        return prepare(self, *args, **kwargs)

    wrapped._kvq_original = prepare  # type: ignore[attr-defined]
    return wrapped


def _given_cache(model_kwargs: Mapping[str, Any]) -> tuple[str, Any]:
    """The cache that a caller of ``generate`` gave, and its name: the newer or the older one."""
    for name in ("cache", "past_key_values"):
        if model_kwargs.get(name) is not None:
            return name, model_kwargs[name]
    is_newer = "cache" in _names(getattr(GenerationMixin, "prepare_inputs_for_generation", None))
    return "cache" if is_newer else "past_key_values", None


def _asks_for_packed(generation_config: Any) -> bool:
    """Whether ``cache_implementation="quantized", cache_config={"backend": "kvq"}`` is meant."""
    options = generation_config.cache_config
    return bool(
        generation_config.cache_implementation == "quantized"
        and generation_config.use_cache is not False
        and isinstance(options, Mapping)
        and str(options.get("backend")).lower() in BACKENDS
    )


def _cache_by_name(options: Mapping[str, Any]) -> Any:
    given = dict(options)
    backend = given.pop("backend").lower()
    # What a backend imports would import this module.
    kind = getattr(importlib.import_module("torch_kvq"), BACKENDS[backend])
    return kind(**aliases.translate(given, backend))


def _beside_cross_attention(model: Any, cache: Any) -> Any:
    """A cache as the model takes it: cross-attention of an encoder-decoder is not packed."""
    if not model.config.is_encoder_decoder:
        return cache
    return EncoderDecoderCache(cache, DynamicCache(config=model.config))
