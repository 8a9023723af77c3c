"""Packed key/value caches for PyTorch and Transformers, attended while they stay packed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from torch_kvq._extension import cpu_capabilities, cpu_capability
from torch_kvq._ops import (
    dequantize_tile,
    fwht,
    key_balance,
    lut_attention,
    quantize_tile,
    quantize_tile_,
)
from torch_kvq._remat_ops import remat_attention, remat_kv
from torch_kvq._tiered_ops import attention_mass, dequantize_far, quantize_far, tiered_attention
from torch_kvq._x_cost import Absorption, choose_absorption, remat_flops
from torch_kvq._x_ops import dequantize_x, quantize_x, sum_x
from torch_kvq.cache import KVQLayer, MemoryReport, TieredLayer

if TYPE_CHECKING:
    from torch_kvq.integrations.estimate import estimate
    from torch_kvq.integrations.similarity import cross_layer_similarity
    from torch_kvq.integrations.transformers import KVQCache
    from torch_kvq.integrations.transformers_tiered import TieredCache
    from torch_kvq.integrations.transformers_x import XQuantCache

__version__ = "0.1.0"

__all__ = [
    "Absorption",
    "KVQCache",
    "KVQLayer",
    "MemoryReport",
    "TieredCache",
    "TieredLayer",
    "XQuantCache",
    "attention_mass",
    "choose_absorption",
    "cpu_capabilities",
    "cpu_capability",
    "cross_layer_similarity",
    "dequantize_far",
    "dequantize_tile",
    "dequantize_x",
    "estimate",
    "fwht",
    "key_balance",
    "lut_attention",
    "quantize_far",
    "quantize_tile",
    "quantize_tile_",
    "quantize_x",
    "remat_attention",
    "remat_flops",
    "remat_kv",
    "sum_x",
    "tiered_attention",
]

_WITH_TRANSFORMERS = {
    "KVQCache": "integrations.transformers",
    "TieredCache": "integrations.transformers_tiered",
    "XQuantCache": "integrations.transformers_x",
    "cross_layer_similarity": "integrations.similarity",
    "estimate": "integrations.estimate",
}
_WITHOUT_TRANSFORMERS = {"KVQCache": "cache.cache", "TieredCache": "cache.tiered_cache"}


def __getattr__(name: str) -> Any:
    """Import what may bring in Transformers when it is asked for."""
    if name not in _WITH_TRANSFORMERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = _lazy(name)
    return found


def _lazy(name: str) -> Any:
    if importlib.util.find_spec("transformers") is not None:
        from torch_kvq.integrations import check_transformers

        check_transformers()
        module = _WITH_TRANSFORMERS[name]
    elif name not in _WITHOUT_TRANSFORMERS:
        raise ImportError(f"{name} needs transformers, whose models it reads")
    else:
        module = _WITHOUT_TRANSFORMERS[name]
    return getattr(importlib.import_module(f"torch_kvq.{module}"), name)
