"""Generation with a tiered cache whose tokens are all near gives those of Transformers' own."""

from __future__ import annotations

import re
from pathlib import Path
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
from tests.models import tiny_model, token_ids
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


@pytest.mark.parametrize("document", ["README.md", "docs/tiers.md"])
def test_recipe_of_the_documents(document: str) -> None:
    text = (Path(__file__).parents[2] / document).read_text()
    recipes = re.findall(r"```python\n(.*?)```", text, re.S)
    (recipe,) = [part for part in recipes if "import TieredCache" in part]
    if "plot_tiers" in recipe:
        pytest.importorskip("matplotlib")
    ids = token_ids(1, 300)
    inputs = {"input_ids": ids, "max_new_tokens": 3, "do_sample": False}
    names: dict[str, Any] = {"model": tiny_model("llama"), "inputs": inputs}
    exec(recipe, names)
    assert names["cache"].get_seq_length() == ids.shape[1] + 2
    assert names["cache"].materialized == 0
    names["cache"].close()
