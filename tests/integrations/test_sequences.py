"""Any sequence of operations, by the methods of Transformers' `Cache`."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from hypothesis import settings

from tests.sequences import SETTINGS, Caches
from torch_kvq import KVQCache


class Growing(Caches):
    make_cache = KVQCache


TestGrowing = Growing.TestCase
TestGrowing.settings = settings(SETTINGS, max_examples=5)
