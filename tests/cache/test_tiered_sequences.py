"""Any sequence of operations on tiered caches and their copies."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.sequences import SETTINGS, ShrinkingPools
from tests.tiered_sequences import TieredCaches
from torch_kvq import _extension
from torch_kvq.cache.tiered_cache import TieredCache

if not _extension.is_compiled:
    pytest.skip("the compiled part is not built", allow_module_level=True)


class FewNear(TieredCaches):
    make_cache = TieredCache


class InTheBackground(FewNear):
    """Tokens come back in any step after the one that finds them."""

    options = {**TieredCaches.options, "promote": True}


class AllNear(TieredCaches):
    make_cache = TieredCache
    options = {**TieredCaches.options, "near_ratio": 1.0}


class WithoutArchive(ShrinkingPools, TieredCaches):
    make_cache = TieredCache
    options = {"near_ratio": 0.2, "promote": False}


TestFewNear = FewNear.TestCase
TestInTheBackground = InTheBackground.TestCase
TestAllNear = AllNear.TestCase
TestWithoutArchive = WithoutArchive.TestCase
TestFewNear.settings = TestInTheBackground.settings = settings(SETTINGS, max_examples=8)
TestAllNear.settings = TestWithoutArchive.settings = TestFewNear.settings
