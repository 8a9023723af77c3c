"""Any sequence of operations on caches that grow, on static ones and on their copies."""

from __future__ import annotations

from unittest import mock

from tests.sequences import SETTINGS, Caches
from torch_kvq.cache import pages
from torch_kvq.cache.cache import KVQCache


class Growing(Caches):
    make_cache = KVQCache


class Static(Caches):
    make_cache = KVQCache
    options = {"max_cache_len": 448}


class Shrinking(Growing):
    """Pools give back memory at every chance."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch.object(pages, "is_sparse", lambda held, used: held > used)
        self.patch.start()

    def teardown(self) -> None:
        self.patch.stop()


TestGrowing = Growing.TestCase
TestStatic = Static.TestCase
TestShrinking = Shrinking.TestCase
TestGrowing.settings = TestStatic.settings = TestShrinking.settings = SETTINGS
