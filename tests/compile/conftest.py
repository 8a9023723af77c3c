"""Each test compiles anew."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def compile_anew() -> Iterator[None]:
    """Forget all graphs and counts; random numbers are the same in every run."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
