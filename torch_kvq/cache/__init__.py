"""Packed key/value caches: bookkeeping around the operators, no arithmetic of their own."""

from torch_kvq.cache.layer import KVQLayer
from torch_kvq.cache.memory import MemoryReport
from torch_kvq.cache.tiered_layer import TieredLayer

__all__ = ["KVQLayer", "MemoryReport", "TieredLayer"]
