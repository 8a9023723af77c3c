"""Generation with a packed cache gives the tokens of Transformers' own at 16 bits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache

from tests.models import ARCHITECTURES, left_padded, tiny_model, token_ids
from torch_kvq import KVQCache

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

Generate = Callable[[Any, Any], torch.Tensor]

PROMPT = token_ids(1, 150)
PADDED = left_padded((90, 5, 0), 130)
GREEDY = {"max_new_tokens": 90, "do_sample": False}


def packed(**options: Any) -> Any:
    """A cache whose tiles, windows and pages all change within 200 tokens."""
    return KVQCache(16, quantized_start=80, residual_length=10, **options)


def greedy(model: Any, cache: Any) -> torch.Tensor:
    return model.generate(PROMPT, past_key_values=cache, **GREEDY)


def from_one_token(model: Any, cache: Any) -> torch.Tensor:
    return model.generate(PROMPT[:, :1], past_key_values=cache, max_new_tokens=120, do_sample=False)


def padded(model: Any, cache: Any) -> torch.Tensor:
    return model.generate(**PADDED, past_key_values=cache, **GREEDY)


def sampling(model: Any, cache: Any) -> torch.Tensor:
    torch.manual_seed(3)
    return model.generate(
        **PADDED,
        past_key_values=cache,
        max_new_tokens=40,
        do_sample=True,
        num_return_sequences=2,
    )


def beams(model: Any, cache: Any) -> torch.Tensor:
    return model.generate(**PADDED, past_key_values=cache, num_beams=3, **GREEDY)


def two_turns(model: Any, cache: Any) -> torch.Tensor:
    first = model.generate(PROMPT, past_key_values=cache, max_new_tokens=20, do_sample=False)
    second = torch.cat((first, PROMPT[:, :50]), 1)
    return model.generate(second, past_key_values=cache, **GREEDY)


def chunked(model: Any, cache: Any) -> torch.Tensor:
    """The first chunk is padding throughout for one row, the second begins within it."""
    return model.generate(**PADDED, past_key_values=cache, prefill_chunk_size=40, **GREEDY)


def prompt_lookup(model: Any, cache: Any) -> torch.Tensor:
    prompt = torch.cat((PROMPT[:, :70], PROMPT[:, :70]), 1)
    return model.generate(prompt, past_key_values=cache, prompt_lookup_num_tokens=12, **GREEDY)


def assistant(model: Any, cache: Any) -> torch.Tensor:
    draft = copy.deepcopy(model)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for parameter in draft.parameters():
            parameter.data += 0.2 * parameter.abs().mean() * torch.randn_like(parameter)
    return model.generate(PROMPT, past_key_values=cache, assistant_model=draft, **GREEDY)


def copied_prefix(model: Any, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
    whole = torch.cat((PROMPT, PROMPT.flip(1)), 1)
    model.generate(whole, past_key_values=copy.deepcopy(cache), **GREEDY)
    return model.generate(whole, past_key_values=copy.deepcopy(cache), **GREEDY)


def embeddings(model: Any, cache: Any) -> torch.Tensor:
    inputs = model.get_input_embeddings()(PROMPT)
    return model.generate(inputs_embeds=inputs, past_key_values=cache, **GREEDY)


def rows_in_and_out(model: Any, cache: Any) -> torch.Tensor:
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        cache.batch_repeat_interleave(4)
        model(token_ids(4, 30), past_key_values=cache)
        cache.batch_select_indices(torch.tensor([3, 0, 2]))
        cache.crop(-7)
        logits = model(token_ids(3, 20, seed=2), past_key_values=cache).logits
    return logits.argmax(-1)


SCENARIOS = (
    greedy,
    from_one_token,
    padded,
    sampling,
    beams,
    two_turns,
    chunked,
    prompt_lookup,
    assistant,
    copied_prefix,
    embeddings,
    rows_in_and_out,
)


def assert_same_tokens(generate: Generate, model: Any, cache: Any) -> None:
    expected = generate(model, DynamicCache(config=model.config))
    assert torch.equal(generate(model, cache), expected)
    assert cache.materialized == 0


@pytest.mark.parametrize("generate", SCENARIOS, ids=lambda generate: generate.__name__)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvq"])
def test_llama(generate: Generate, attention: str) -> None:
    model = tiny_model("llama", attention)
    assert_same_tokens(generate, model, packed(config=model.config))


@pytest.mark.parametrize("generate", [greedy, padded, chunked, beams], ids=lambda f: f.__name__)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvq"])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "llama"])
def test_other_architectures(generate: Generate, attention: str, name: str) -> None:
    assert_same_tokens(generate, tiny_model(name, attention), packed())


@pytest.mark.parametrize("name", ["gemma2", "gpt-oss"])
@pytest.mark.parametrize("attention", ["eager", "kvq"])
@pytest.mark.parametrize("generate", [greedy, padded], ids=lambda f: f.__name__)
def test_softcap_and_sinks(generate: Generate, attention: str, name: str) -> None:
    assert_same_tokens(generate, tiny_model(name, attention), packed())


@pytest.mark.parametrize("generate", [greedy, padded, two_turns], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_static(generate: Generate, name: str) -> None:
    assert_same_tokens(generate, tiny_model(name), packed(max_cache_len=400))


@pytest.mark.parametrize("generate", [greedy, padded, two_turns], ids=lambda f: f.__name__)
def test_static_without_a_length(generate: Generate) -> None:
    assert_same_tokens(generate, tiny_model("llama"), packed(static=True))


@pytest.mark.parametrize("generate", [beams, rows_in_and_out, chunked], ids=lambda f: f.__name__)
def test_static_rows(generate: Generate) -> None:
    model = tiny_model("llama")
    assert_same_tokens(generate, model, packed(config=model.config, max_cache_len=400))


@pytest.mark.parametrize("bits", [4, "4/3", 3, 2])
def test_few_bits_decode_fused(bits: int | str) -> None:
    cache = KVQCache(bits, quantized_start=80, residual_length=10, strict=True)
    padded(tiny_model("llama"), cache)
    assert cache.layers[0].state.lengths[:, 2].min() >= 64
    assert cache.materialized == 0
