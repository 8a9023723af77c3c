"""Generation with a packed cache gives the tokens of Transformers' own at 16 bits."""

from __future__ import annotations

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
    cropped,
    greedy,
    padded,
    rows,
    two_turns,
)
from tests.models import tiny_model, token_ids
from torch_kvq import KVQCache

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")


def packed(**options: Any) -> Any:
    """A cache whose tiles, windows and pages all change within 200 tokens."""
    return KVQCache(16, quantized_start=80, residual_length=10, **options)


def assert_same_tokens(scenario: Scenario, model: Any, cache: Any) -> None:
    expected = scenario(model, DynamicCache(config=model.config), LONG)
    assert torch.equal(scenario(model, cache, LONG), expected)
    assert cache.materialized == 0


def named(scenario: Scenario) -> str:
    return scenario.__name__


@pytest.mark.parametrize("scenario", SCENARIOS, ids=named)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvq"])
def test_llama(scenario: Scenario, attention: str) -> None:
    model = tiny_model("llama", attention)
    assert_same_tokens(scenario, model, packed(config=model.config))


@pytest.mark.parametrize("scenario", [greedy, padded, chunked, beams], ids=named)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvq"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral", "mistral-window", "gpt2"])
def test_other_architectures(scenario: Scenario, attention: str, name: str) -> None:
    assert_same_tokens(scenario, tiny_model(name, attention), packed())


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
@pytest.mark.parametrize("attention", ["eager", "kvq"])
@pytest.mark.parametrize("scenario", [greedy, padded], ids=named)
def test_softcap_and_sinks(scenario: Scenario, attention: str, name: str) -> None:
    assert_same_tokens(scenario, tiny_model(name, attention), packed())


@pytest.mark.parametrize("scenario", [greedy, padded, two_turns], ids=named)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_static(scenario: Scenario, name: str) -> None:
    assert_same_tokens(scenario, tiny_model(name), packed(max_cache_len=400))


@pytest.mark.parametrize("scenario", [greedy, padded, two_turns], ids=named)
def test_static_without_a_length(scenario: Scenario) -> None:
    assert_same_tokens(scenario, tiny_model("llama"), packed(static=True))


@pytest.mark.parametrize("scenario", [beams, rows, cropped, chunked], ids=named)
def test_static_rows(scenario: Scenario) -> None:
    model = tiny_model("llama")
    assert_same_tokens(scenario, model, packed(config=model.config, max_cache_len=400))


@pytest.mark.parametrize("bits", [4, "4/3", 3, 2])
def test_few_bits_decode_fused(bits: int | str) -> None:
    cache = KVQCache(bits, quantized_start=80, residual_length=10, strict=True)
    padded(tiny_model("llama"), cache, LONG)
    assert cache.layers[0].state.lengths[:, 2].min() >= 64
    assert cache.materialized == 0


def test_beams_share_the_pages_of_their_prompt() -> None:
    model = tiny_model("llama", max_position_embeddings=4096)
    prompt = token_ids(1, 2048)
    pages = []
    for num_beams in (1, 4):
        cache = KVQCache(4)
        options = {"do_sample": False, "max_new_tokens": 100, "num_beams": num_beams}
        model.generate(prompt, past_key_values=cache, **options)
        pools = [layer.state.table.pool for layer in cache.layers]
        pages.append([sum(pool.used for pool in pools), sum(len(pool.tiles) for pool in pools)])
    for alone, together in zip(*pages, strict=True):
        assert alone <= together < 1.35 * alone
