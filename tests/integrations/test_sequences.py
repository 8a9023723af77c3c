"""Any sequence of operations, by the methods of Transformers' `Cache`."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from hypothesis import settings

from tests.sequences import SETTINGS, Caches
from tests.tiered_sequences import TieredCaches
from torch_kvq import KVQCache, TieredCache, _extension


class Growing(Caches):
    make_cache = KVQCache


class Tiered(TieredCaches):
    make_cache = TieredCache


TestGrowing = Growing.TestCase
TestGrowing.settings = settings(SETTINGS, max_examples=5)
if _extension.is_compiled:
    TestTiered = Tiered.TestCase
    TestTiered.settings = TestGrowing.settings
