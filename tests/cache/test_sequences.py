"""Any sequence of operations on caches that grow, on static ones and on their copies."""

from __future__ import annotations

from tests.sequences import SETTINGS, Caches, ShrinkingPools
from torch_kvq.cache.cache import KVQCache


class Growing(Caches):
    make_cache = KVQCache


class Static(Caches):
    make_cache = KVQCache
    options = {"max_cache_len": 448}


class Shrinking(ShrinkingPools, Growing):
    pass


TestGrowing = Growing.TestCase
TestStatic = Static.TestCase
TestShrinking = Shrinking.TestCase
TestGrowing.settings = TestStatic.settings = TestShrinking.settings = SETTINGS
