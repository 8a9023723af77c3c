"""Caches of layer inputs: tokens, hooks, and models that cannot be served."""

from __future__ import annotations

import copy
import gc
import pickle
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
    greedy,
    padded,
)
from tests.models import tiny_config, tiny_model, token_ids
from torch_kvq import XQuantCache

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

PROMPT = token_ids(1, 120)
GREEDY = {"max_new_tokens": 5, "do_sample": False}


def lossless(**options: Any) -> Any:
    """A cache that packs pages within 200 tokens, and loses nothing."""
    return XQuantCache(16, residual_length=10, **options)


def hooks(model: Any) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


def assert_same_tokens(scenario: Scenario, model: Any, cache: Any) -> None:
    expected = scenario(model, DynamicCache(config=model.config), LONG)
    assert torch.equal(scenario(model, cache, LONG), expected)
    assert cache.materialized == 0


def named(scenario: Scenario) -> str:
    return scenario.__name__


@pytest.mark.parametrize("scenario", SCENARIOS, ids=named)
def test_llama(scenario: Scenario) -> None:
    model = tiny_model("llama")
    assert_same_tokens(scenario, model, lossless(mode="x", model=model))


@pytest.mark.parametrize("scenario", [greedy, padded, beams], ids=named)
@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3", "phi3", "gemma3", "mistral", "gpt2", "opt", "gpt-neox", "falcon"]
)
def test_other_architectures(scenario: Scenario, name: str) -> None:
    assert_same_tokens(scenario, tiny_model(name), lossless(mode="x"))


@pytest.mark.parametrize("attention", ["eager", "kvq"])
def test_attention_implementations(attention: str) -> None:
    assert_same_tokens(padded, tiny_model("llama", attention), lossless(mode="x"))


def test_hooks_go_with_their_cache() -> None:
    model, other = tiny_model("llama"), tiny_model("gpt2")
    before = hooks(model), hooks(other)
    caches = [lossless() for _ in range(3)]
    owners = [model, model, other]
    want = [owner.generate(PROMPT, **GREEDY) for owner in owners]
    for cache, owner, tokens in zip(caches, owners, want, strict=True):
        assert torch.equal(owner.generate(PROMPT, past_key_values=cache, **GREEDY), tokens)
    assert (hooks(model), hooks(other)) > before
    clone = copy.deepcopy(caches[0])
    fork = caches[1].fork()
    del caches, cache
    gc.collect()
    for kept in (clone, fork):
        more = torch.cat((want[0], PROMPT), 1)
        got = model.generate(more, past_key_values=kept, **GREEDY)
        assert torch.equal(got, model.generate(more, **GREEDY))
    del clone, fork, kept
    gc.collect()
    assert (hooks(model), hooks(other)) == before


def test_saved_cache_is_bound_anew() -> None:
    model, cache = tiny_model("llama"), lossless()
    first = model.generate(PROMPT, past_key_values=cache, **GREEDY)
    loaded = pickle.loads(pickle.dumps(cache))
    more = torch.cat((first, PROMPT), 1)
    got = model.generate(more, past_key_values=loaded, **GREEDY)
    assert torch.equal(got, model.generate(more, **GREEDY))


def test_cut_into_packed_pages() -> None:
    model = tiny_model("llama")
    cache = lossless(model=model)
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        assert cache.layers[1].state.quantized == 64
        cache.crop(40)
        got = model(PROMPT[:, 40:], past_key_values=cache).logits
        torch.testing.assert_close(got, model(PROMPT).logits[:, 40:], rtol=1e-4, atol=1e-4)


def test_without_a_model() -> None:
    with pytest.raises(ValueError, match="has to be bound to its model"):
        tiny_model("llama")(PROMPT, past_key_values=lossless())


def test_models_that_cannot_be_served() -> None:
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder"):
        lossless(model=tiny_model("t5"))
    model = copy.deepcopy(tiny_model("llama"))
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Sequential(attention.k_proj)
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn \(LlamaAttention\).*Sequen"):
        lossless(model=model)
    model = copy.deepcopy(tiny_model("llama"))
    model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda *args: 2 * args[-1])
    with pytest.raises(ValueError, match="layers.1.self_attn .*in a way that is not known"):
        model(PROMPT, past_key_values=lossless(model=model))
    assert hooks(model) == 1


def test_frequencies_that_change_are_refused() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = type(tiny_model("llama"))(tiny_config("llama", rope_parameters=rope)).eval()
    cache = lossless(model=model)
    model(PROMPT, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="LlamaRotaryEmbedding is of the type 'dynamic'"):
        model(PROMPT, past_key_values=cache)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny_model(name)).to(dtype)
    results = []
    with torch.no_grad():
        for cache in (DynamicCache(), lossless(model=model)):
            model(PROMPT, past_key_values=cache)
            results.append(model(PROMPT[:, :5], past_key_values=cache).logits.float())
    want, got = results
    assert (got - want).norm() / want.norm() < (0.01 if dtype == torch.float16 else 0.06)
