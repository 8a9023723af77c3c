"""Bytes of a cache before its model is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from torch_kvq.cache.expected import (
    Prompt,
    archive_bytes,
    input_parts,
    packed_parts,
    tiered_parts,
)
from torch_kvq.cache.layer import KVQLayer
from torch_kvq.cache.memory import MemoryReport
from torch_kvq.cache.packed import PackedLayer
from torch_kvq.cache.promotion import keeps_archive
from torch_kvq.cache.tiered_layer import TieredLayer
from torch_kvq.cache.x_bytes import LayerDims
from torch_kvq.cache.x_embedded import EmbeddedLayer
from torch_kvq.cache.x_latent import LatentLayer
from torch_kvq.cache.x_layer import XQuantLayer
from torch_kvq.cache.x_state import Stream
from torch_kvq.integrations.transformers import KVQCache
from torch_kvq.integrations.transformers_layout import TransformersCache, decoder_config, head_dims
from torch_kvq.integrations.transformers_tiered import TieredCache

_ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)
_INT32 = 4


def estimate(
    config: Any,
    context: int,
    batch: int = 1,
    *,
    dtype: torch.dtype | None = None,
    cache: type[TransformersCache] = KVQCache,
    **options: Any,
) -> MemoryReport:
    """Bytes that a packed cache takes for a context, from a model's configuration alone.

    The report is what ``cache.memory_report()`` gives after a prompt of so many tokens. While
    decoding, pools grow by an eighth at a time. Layers with linear attention are not counted: their
    size does not depend on the context. No archive is made for a `TieredCache`; what it would have
    in a file is in ``disk_bytes``, once all full pages are written. The first layer of an
    `XQuantCache` is taken to store token numbers where the model has a rotary embedding.

    Args:
        config: configuration of a Transformers model.
        context: tokens of each row.
        batch: rows.
        dtype: of the model; the configuration's when not given, float32 if it names none.
        cache: class of the cache: `KVQCache`, `TieredCache` or `XQuantCache`.
        **options: of the cache, as its class takes them.

    Raises:
        ValueError: fewer than one token or row, or options that do not exist.
        TypeError: ``cache`` is something else.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32,
        ...                      num_key_value_heads=8, dtype="bfloat16")
        >>> report = estimate(config, context=131072, bits=4)
        >>> report.total_bytes >> 20, report.fp16_bytes >> 20
        (4332, 16384)
        >>> report = estimate(config, context=131072, cache=TieredCache, near_ratio=0.1)
        >>> report.total_bytes >> 20, report.disk_bytes >> 20
        (8151, 16384)
    """
    for name, value in (("context", context), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not (isinstance(cache, type) and issubclass(cache, TransformersCache)):
        raise TypeError(f"cache must be a class of caches such as TieredCache, got {cache!r}")
    archive = _archive_options(options) if issubclass(cache, TieredCache) else None
    made = cache(config=config, **options)
    itemsize = (dtype or getattr(config, "dtype", None) or torch.float32).itemsize
    parts, fp16_bytes, tiered = [], 0, []
    for layer, own in zip(made.layers, decoder_config(config).per_layer_config, strict=False):
        heads, dims = _kept(own)
        held = context if isinstance(layer, PackedLayer) else _tokens_held(layer, context)
        prompt = Prompt(batch, held, heads, *dims, itemsize)
        parts.append(_parts(layer, prompt, own))
        fp16_bytes += prompt.fp16_bytes
        if isinstance(layer, TieredLayer):
            tiered.append(prompt)
    report = MemoryReport.collect(parts, fp16_bytes, batch * context)
    return report if archive is None else _with_archive(report, tiered, **archive)


def _parts(layer: Any, prompt: Prompt, config: Any) -> dict[str, int]:
    """Bytes of a layer by what they are for."""
    if isinstance(layer, KVQLayer):
        return packed_parts(layer.options, prompt)
    if isinstance(layer, TieredLayer):
        return tiered_parts(layer.options, prompt)
    if isinstance(layer, XQuantLayer):
        return _input_parts(layer, prompt, config)
    size = prompt.tokens * prompt.row_bytes
    return {"other layers": size} if size else {}


def _input_parts(layer: XQuantLayer, prompt: Prompt, config: Any) -> dict[str, int]:
    has_rotary = bool(getattr(config, "rope_parameters", None) or hasattr(config, "rope_theta"))
    size = prompt.batch * prompt.tokens
    if has_rotary and isinstance(layer, EmbeddedLayer):
        parts = {"pages": 0, "exact": size * _INT32, "block table": 0}
    else:
        streams = _streams(layer, prompt, config)
        parts = input_parts(layer.options, streams, prompt.batch, prompt.tokens, prompt.itemsize)
    if has_rotary and not layer.ordinal:
        parts["positions"] = size * _INT32
    return parts


def _streams(layer: XQuantLayer, prompt: Prompt, config: Any) -> list[Stream]:
    if not isinstance(layer, LatentLayer):
        return XQuantLayer.streams(layer, config.hidden_size)
    dims = LayerDims(config.hidden_size, prompt.kv_heads, prompt.key_dim, prompt.value_dim)
    options = layer.options
    return [Stream(channels, options.bits, options.group_axis) for channels in dims.latents]


def _archive_options(options: dict[str, Any]) -> dict[str, Any] | None:
    """Take what asks for an archive out of the options of a cache; None if it has none."""
    path, budget = options.pop("archive", None), options.pop("archive_budget", None)
    promote, in_memory = options.pop("promote", True), options.pop("archive_in_memory", False)
    options["promote"] = False
    if not keeps_archive(promote, path, budget, in_memory):
        return None
    return {"budget": budget, "in_memory": in_memory}


def _with_archive(
    report: MemoryReport, prompts: list[Prompt], budget: int | None, in_memory: bool
) -> MemoryReport:
    held, is_open = archive_bytes(prompts, budget)
    size = held if in_memory else is_open
    parts = {**report.parts, "archive": size}
    total = report.total_bytes + size
    return replace(report, total_bytes=total, parts=parts, disk_bytes=held - size)


def _kept(config: Any) -> tuple[int, tuple[int, int]]:
    """Heads and channels of what a layer keeps of a token."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return 1, (config.kv_lora_rank, config.qk_rope_head_dim)
    return kv_heads(config), head_dims(config)


def kv_heads(config: Any) -> int:
    """Heads of keys and values, from the configuration of a layer."""
    if getattr(config, "multi_query", False) and not config.new_decoder_architecture:
        return 1
    for name in ("num_kv_heads", "num_key_value_heads", "num_attention_heads"):
        heads = getattr(config, name, None)
        if heads:
            return int(heads)
    raise ValueError(f"config must name its heads, got {type(config).__name__} without any")


def _tokens_held(layer: Any, context: int) -> int:
    """Tokens of a row in a layer of Transformers; 0 where their number means nothing."""
    if type(layer) not in _ATTENTION_LAYERS:
        return 0
    if getattr(layer, "max_cache_len", None) is not None:
        return int(layer.max_cache_len)
    if getattr(layer, "is_sliding", False):
        return min(context, int(layer.sliding_window) - 1)
    return context
