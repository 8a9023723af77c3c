"""Packed key/value caches: bookkeeping around the operators, no arithmetic of their own."""

from torch_kvq.cache.layer import KVQLayer
from torch_kvq.cache.memory import MemoryReport

__all__ = ["KVQLayer", "MemoryReport"]
