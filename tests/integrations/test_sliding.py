"""Layers with a long sliding window are packed, and give the tokens of Transformers' own layers."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticSlidingWindowLayer

from tests.integrations.scenarios import SCENARIOS, Load, Scenario, cropped, greedy, padded
from tests.models import tiny_config, tiny_model
from torch_kvq import KVQCache, KVQLayer, TieredCache, TieredLayer, estimate

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

RESIDUAL = 10
WINDOW = RESIDUAL + 64 + 1

LOAD = Load(tokens=230, new_tokens=60, padding=(90, 5, 0), chunk=70, short=20)
"""Pages are given up with the prompt."""


def packed(**options: Any) -> Any:
    """A cache that gives up pages within 230 tokens."""
    return KVQCache(16, quantized_start=80, residual_length=RESIDUAL, **options)


def named(scenario: Scenario) -> str:
    return scenario.__name__


def assert_same_tokens(scenario: Scenario, model: Any, make: Any = packed) -> Any:
    cache = make(config=model.config)
    try:
        expected = scenario(model, DynamicCache(config=model.config), LOAD)
    except RuntimeError as error:
        # Older releases forget what a rejected draft would need.
        if hasattr(DynamicSlidingWindowLayer, "activate_past_recording"):
            raise
        pytest.skip(f"not with DynamicCache: {error}")
    assert torch.equal(scenario(model, cache, LOAD), expected)
    assert all(isinstance(layer, (KVQLayer, TieredLayer)) for layer in cache.layers)
    assert cache.materialized == 0
    return cache


def tiered(**options: Any) -> Any:
    """A cache whose tokens are all near, and give up what leaves the window."""
    given = {"near_ratio": 1.0, "quantized_start": 80, "window": RESIDUAL, "promote": False}
    return TieredCache(**given, **options)


# Transformers' own layer can forget nothing that left its window.
CROPPING = (cropped,)


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s not in CROPPING], ids=named)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvq"])
def test_mistral(scenario: Scenario, attention: str) -> None:
    model = tiny_model("mistral-window", attention, sliding_window=WINDOW)
    assert_same_tokens(scenario, model)


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s not in CROPPING], ids=named)
def test_two_tiers(scenario: Scenario) -> None:
    model = tiny_model("mistral-window", sliding_window=WINDOW)
    cache = assert_same_tokens(scenario, model, tiered)
    if scenario is greedy:
        for layer in cache.layers:
            assert layer.state.first_position == 4 + 64
            assert layer.state.table.pool.used < int(layer.state.lengths[0, 2]) // 64


@pytest.mark.parametrize("make", [packed, tiered], ids=["packed", "tiered"])
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("attention", ["eager", "kvq"])
@pytest.mark.parametrize("scenario", [greedy, padded], ids=named)
def test_beside_full_attention(scenario: Scenario, attention: str, name: str, make: Any) -> None:
    model = tiny_model(name, attention, sliding_window=WINDOW)
    cache = assert_same_tokens(scenario, model, make)
    assert {layer.options.sliding_window for layer in cache.layers} == {None, WINDOW}


def test_pages_are_given_up() -> None:
    model = tiny_model("mistral-window", sliding_window=WINDOW)
    cache = assert_same_tokens(greedy, model)
    for layer in cache.layers:
        assert layer.state.first_position == 4 + 64
        assert layer.state.table.pool.used < int(layer.state.lengths[0, 2]) // 64


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"skip_layers": (0,)}, "1 not: skip_layers; 1 not: sliding window beside one that is not"),
        ({"residual_length": RESIDUAL + 1}, "2 not: sliding window"),
    ],
    ids=str,
)
def test_sliding_layers_are_of_one_kind(
    options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "torch_kvq")
    config = tiny_config("mistral-window", sliding_window=WINDOW)
    cache = KVQCache(4, config=config, **{"residual_length": RESIDUAL, **options})
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer] * 2
    assert reason in caplog.text


def test_static_caches_keep_the_layers_of_transformers() -> None:
    config = tiny_config("mistral-window", sliding_window=WINDOW)
    cache = packed(config=config, max_cache_len=300)
    assert [type(layer) for layer in cache.layers] == [StaticSlidingWindowLayer] * 2


@pytest.mark.parametrize("far", ["fp8-int4", "tile4"])
@pytest.mark.parametrize("tokens", [100, 700, 3000])
def test_estimate_of_two_tiers(tokens: int, far: str) -> None:
    layer = TieredLayer(far=far, sliding_window=300)
    layer.update(*torch.randn(2, 3, 2, tokens, 32))
    layer.flush()
    model = tiny_model("mistral-window", sliding_window=300, num_hidden_layers=1)
    found = estimate(model.config, tokens, 3, cache=TieredCache, far=far, promote=False)
    assert found.by_layer[0] == layer.memory_parts()
