"""Generation with a tiered cache whose tokens are all near gives those of Transformers' own."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache

from tests.integrations.scenarios import (
    LONG,
    SCENARIOS,
    Scenario,
    beams,
    chunked,
    greedy,
    padded,
    two_turns,
)
from tests.models import tiny_model
from torch_kvq import TieredCache

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")


def tiered(**options: Any) -> Any:
    """A cache whose tiles, windows and near sets all change within 200 tokens."""
    given = {"near_ratio": 1.0, "quantized_start": 80, "window": 10, "promote": False}
    return TieredCache(**{**given, **options})


def assert_same_tokens(scenario: Scenario, model: Any, cache: Any) -> None:
    expected = scenario(model, DynamicCache(config=model.config), LONG)
    assert torch.equal(scenario(model, cache, LONG), expected)
    assert cache.materialized == 0


def named(scenario: Scenario) -> str:
    return scenario.__name__


@pytest.mark.parametrize("scenario", SCENARIOS, ids=named)
@pytest.mark.parametrize("far", ["fp8-int4", "tile4"])
def test_everything_near(scenario: Scenario, far: str) -> None:
    model = tiny_model("llama")
    cache = tiered(far=far, config=model.config)
    assert_same_tokens(scenario, model, cache)
    if scenario is greedy:
        assert all(layer.state.lengths[0, 2] > 0 for layer in cache.tiered_layers)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=named)
def test_everything_near_with_an_archive(scenario: Scenario) -> None:
    """Which follows all that happens to rows and tokens."""
    cache = tiered(promote="sync", cooldown=1)
    assert_same_tokens(scenario, tiny_model("llama"), cache)
    if scenario in (greedy, padded, beams):
        archive = cache.promotion.archive.layer(1)
        assert (archive.rows, archive.tokens) == (
            cache.layers[1].state.batch_size,
            cache.get_seq_length(),
        )


@pytest.mark.parametrize("promote", [True, "sync"])
def test_tokens_come_back_while_a_model_generates(promote: Any) -> None:
    """The tiny model attends to nearly everything, so a margin of 0 brings many back."""
    model = tiny_model("llama")
    cache = tiered(promote=promote, near_ratio=0.2, margin=-20.0, cooldown=1)
    padded(model, cache, LONG)
    assert cache.promoted > 0
    report = cache.memory_report()
    assert set(report.parts) >= {"near", "far", "archive"}
    assert "TieredCache(near_ratio=0.2, far='fp8-int4', layers=2, tokens=" in repr(cache)
    cache.reset()
    assert cache.promoted == 0 and cache.promotion.archive.layer(0).tokens == 0
    assert padded(model, cache, LONG).shape == (3, 240)


def test_layout_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torch_kvq")
    model = tiny_model("gemma3", "eager")
    greedy(model, tiered(), LONG)
    assert caplog.messages == ["1 of 2 layers are packed at fp8-int4; 1 not: sliding window"]


def test_a_cache_belongs_to_one_model() -> None:
    cache = tiered(skip_layers=(0,))
    greedy(tiny_model("llama"), cache, LONG)
    assert len(cache.tiered_layers) == 1
    with pytest.raises(ValueError, match="the cache holds tokens of a model with 2 layers"):
        greedy(tiny_model("llama", num_hidden_layers=3), cache, LONG)
    with pytest.raises(TypeError, match="max_cache_len"):
        TieredCache(max_cache_len=100)


@pytest.mark.parametrize("scenario", [greedy, padded, beams, two_turns], ids=named)
def test_window_longer_than_the_text(scenario: Scenario) -> None:
    cache = tiered(near_ratio=0.0, window=1000)
    assert_same_tokens(scenario, tiny_model("llama"), cache)
    assert all(layer.state.lengths[0, 2] == 0 for layer in cache.tiered_layers)


@pytest.mark.parametrize("scenario", [padded, chunked], ids=named)
@pytest.mark.parametrize("attention", ["eager", "kvq"])
@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "gemma2", "gpt-oss"])
def test_other_architectures(scenario: Scenario, attention: str, name: str) -> None:
    assert_same_tokens(scenario, tiny_model(name, attention), tiered())
