"""Facts that only exact keys tell from their neighbours, asked for one after the other."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cache.tiered import normal
from torch_kvq import _extension
from torch_kvq.cache.tiered_cache import TieredCache

if not _extension.is_compiled:
    pytest.skip("the compiled part is not built", allow_module_level=True)

FACTS, TOKENS, DIM, STEPS = 64, 2048, 64, 6
FIRST, EVERY, AWAY = 100, 28, 7
"""Token of the first fact, tokens from one to the next, and from each to its neighbour."""

GAP = 0.05
"""By how much the score of a fact exceeds that of its neighbour; far keys err by more."""


@functools.cache
def task() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, a query for each fact, and the value that answers it."""
    key, value = normal(2, 1, 1, TOKENS, DIM)
    places = torch.arange(FACTS) * EVERY + FIRST
    fact = key[0, 0, places]
    query = 2 * fact
    step = normal(FACTS, DIM, seed=1)
    # A neighbour differs in all channels, and along the query by the gap alone.
    step = step - query * (step * query).sum(-1, keepdim=True) / query.square().sum(
        -1, keepdim=True
    )
    away = query * GAP * DIM**0.5 / query.square().sum(-1, keepdim=True)
    key[0, 0, places + AWAY] = fact + 0.3 * step - away
    return key, value, query, value[0, 0, places]


def answers(attend: Any) -> int:
    """Facts for which attention gives something closer to their value than to their neighbour's."""
    _, values, query, value = task()
    right = 0
    for number in range(FACTS):
        out = attend(query[number].view(1, 1, 1, DIM)).view(-1)
        neighbour = values[0, 0, FIRST + EVERY * number + AWAY]
        right += bool((out - value[number]).norm() < (out - neighbour).norm())
    return right


def asked(far: str, promote: Any) -> int:
    """Right answers of a tiered layer, at the last of some steps for each fact."""
    key, value, *_ = task()
    cache = TieredCache(far=far, promote=promote)
    layer = cache._new_layer()
    cache.layers.append(layer)
    layer.update(key, value)
    layer.attend(normal(1, 1, 32, DIM, seed=2), is_causal=True)
    steps = 0

    def attend(query: Tensor) -> Tensor:
        nonlocal steps
        for _ in range(STEPS):
            layer.update(*normal(2, 1, 1, 1, DIM, seed=100 + steps))
            out = layer.attend(query)
            steps += 1
        return out

    return answers(attend)


@pytest.mark.parametrize("far", ["fp8-int4", "tile4"])
def test_promotion_finds_facts_that_far_keys_confuse(far: str) -> None:
    key, value, *_ = task()
    exact = answers(lambda query: F.scaled_dot_product_attention(query, key, value))
    without = asked(far, promote=False)
    found = asked(far, promote="sync")
    assert exact == FACTS
    assert found >= exact - 1
    assert without <= exact - 6
