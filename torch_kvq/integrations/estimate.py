"""Bytes of a cache before its model is loaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from torch_kvq.cache.layer import KVQLayer
from torch_kvq.cache.memory import MemoryReport, expected_parts
from torch_kvq.integrations.transformers import KVQCache
from torch_kvq.integrations.transformers_layout import decoder_config, head_dims

_ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer)


def estimate(
    config: Any,
    context: int,
    batch: int = 1,
    *,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> MemoryReport:
    """Bytes that a packed cache takes for a context, from a model's configuration alone.

    The report is what ``cache.memory_report()`` gives after a prompt of so many tokens. While
    decoding, pools grow by an eighth at a time. Layers with linear attention are not counted: their
    size does not depend on the context.

    Args:
        config: configuration of a Transformers model.
        context: tokens of each row.
        batch: rows.
        dtype: of the model; the configuration's when not given, float32 if it names none.
        **options: of the cache, as `KVQCache` takes them.

    Raises:
        ValueError: fewer than one token or row, or options that do not exist.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(num_hidden_layers=32, hidden_size=4096, num_attention_heads=32,
        ...                      num_key_value_heads=8, dtype="bfloat16")
        >>> report = estimate(config, context=131072, bits=4)
        >>> report.total_bytes >> 20, report.fp16_bytes >> 20
        (4332, 16384)
    """
    for name, value in (("context", context), ("batch", batch)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    cache = KVQCache(config=config, **options)
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    parts, fp16_bytes = [], 0
    for layer, own in zip(cache.layers, decoder_config(config).per_layer_config, strict=False):
        heads, dims = _kept(own)
        if isinstance(layer, KVQLayer):
            held = context
            parts.append(
                expected_parts(layer.options, batch, heads, *dims, dtype.itemsize, context)
            )
        else:
            held = _tokens_held(layer, context)
            size = batch * heads * held * sum(dims) * dtype.itemsize
            parts.append({"other layers": size} if size else {})
        fp16_bytes += batch * heads * held * sum(dims) * 2
    return MemoryReport.collect(parts, fp16_bytes, batch * context)


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
