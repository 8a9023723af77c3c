"""Caches of layer inputs: tokens, hooks, and models that cannot be served."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache

from tests.integrations.scenarios import (
    BRIEF,
    SCENARIOS,
    Load,
    Scenario,
    beams,
    from_one_token,
    padded,
)
from tests.models import tiny_config, tiny_model, token_ids
from torch_kvq import XQuantCache
from torch_kvq.cache.x_layer import XQuantLayer
from torch_kvq.cache.x_state import XState
from torch_kvq.reference.remat import Weights

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

MODES = ["x", "cl", "latent"]
PROMPT = token_ids(1, 120)
GREEDY = {"max_new_tokens": 5, "do_sample": False}


def lossless(mode: str = "x", **options: Any) -> Any:
    """A cache that packs pages within 140 tokens, and loses nothing."""
    return XQuantCache(16, mode=mode, residual_length=10, first_layers=1, **options)


def hooks(model: Any) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


@functools.cache
def expected(scenario: Scenario, name: str, load: Load, **changes: Any) -> torch.Tensor:
    model = tiny_model(name, **changes)
    return scenario(model, DynamicCache(config=model.config), load)


def named(scenario: Scenario) -> str:
    return scenario.__name__


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=named)
def test_llama(scenario: Scenario, mode: str) -> None:
    load = replace(BRIEF, new_tokens=50) if scenario is from_one_token else BRIEF
    model = tiny_model("llama", num_hidden_layers=3)
    cache = lossless(mode, model=model, strict=True)
    want = expected(scenario, "llama", load, num_hidden_layers=3)
    assert torch.equal(scenario(model, cache, load), want)
    assert all(layer.state.quantized for layer in cache.layers[1:]) and cache.mode == mode


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scenario", [padded, beams], ids=named)
@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3", "phi3", "gemma3", "mistral", "gpt2", "opt", "gpt-neox", "falcon"]
)
def test_other_architectures(scenario: Scenario, name: str, mode: str) -> None:
    cache = lossless(mode)
    assert torch.equal(scenario(tiny_model(name), cache, BRIEF), expected(scenario, name, BRIEF))
    assert cache.materialized == 0 and cache.layers[1].state.quantized


@pytest.mark.parametrize("attention", ["eager", "kvq"])
def test_attention_implementations(attention: str) -> None:
    cache = lossless()
    got = padded(tiny_model("llama", attention), cache, BRIEF)
    assert torch.equal(got, expected(padded, "llama", BRIEF)) and cache.materialized == 0


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_absolute_positions_need_neither_keys_nor_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both weights are absorbed where a step is cheaper so, unless a cache says otherwise."""
    made: list[str] = []
    for kind in ("keys", "values"):
        make = getattr(Weights, kind)

        def noted(*args: Any, kind: str = kind, make: Any = make) -> torch.Tensor:
            made.append(kind)
            return make(*args)

        monkeypatch.setattr(Weights, kind, noted)
    model = tiny_model(name)
    for absorb, kinds in ((None, set()), (False, {"values"})):
        cache = lossless(model=model, absorb_value=absorb)
        with torch.no_grad():
            for ids in (PROMPT, PROMPT[:, :1]):
                model(ids, past_key_values=cache)  # and compare it with what the model makes
            made.clear()
            model(PROMPT[:, :1], past_key_values=cache)
        assert set(made) == kinds


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [200, 90])
def test_padded_rows_are_what_they_are_alone(mode: str, chunk: int) -> None:
    """Over several turns at 4 bits, where padding of whole pages leaves the others as they are."""
    model = tiny_model("llama", num_hidden_layers=3)
    prompt, turns = token_ids(2, 200), token_ids(2, 150, seed=3).split([1, 100, 1, 48], 1)
    mask = torch.ones(2, 350, dtype=torch.int64)
    mask[0, :64] = 0
    rows = []
    for row, start in ((slice(None), 0), (slice(0, 1), 64), (slice(1, 2), 0)):
        cache = XQuantCache(4, mode=mode, residual_length=10, first_layers=1, model=model)
        first, *others = prompt[row].split(chunk, 1)
        calls, seen = [first[:, start:], *others, *(ids[row] for ids in turns)], start
        out = []
        for ids in calls:
            held = mask[row, start : seen + ids.shape[1]]
            positions = (held.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            given = {"attention_mask": held, "position_ids": positions, "past_key_values": cache}
            with torch.no_grad():
                out.append(model(ids, **given).logits)
            seen += ids.shape[1]
        assert cache.layers[2].state.quantized == (350 - start - 10) // 64 * 64
        rows.append(torch.cat(out, 1)[:, -150:])
    both, *alone = rows
    want = torch.cat(alone)
    # Codes round the other way now and then, as sums of a batch do.
    assert (both - want).norm() / want.norm() < 0.01


def test_caches_take_turns() -> None:
    """Two caches of a model, and one of another, a token at a time."""
    models = [tiny_model("llama"), tiny_model("llama"), tiny_model("gpt2")]
    caches = [lossless("x"), lossless("latent"), lossless("x")]
    ids = [token_ids(1, 100, seed=seed) for seed in range(3)]
    with torch.no_grad():
        for model, cache, own in zip(models, caches, ids, strict=True):
            cache.bind(model)
            model(own[:, :90], past_key_values=cache)
        for step in range(90, 100):
            for model, cache, own in zip(models, caches, ids, strict=True):
                got = model(own[:, step : step + 1], past_key_values=cache).logits
                want = model(own[:, : step + 1], use_cache=False).logits[:, -1:]
                torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


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


def test_copies_of_a_model_have_no_hooks() -> None:
    """Nobody would remove them there."""
    model = tiny_model("llama")
    cache = lossless(model=model)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for clone in copies:
        with torch.no_grad():
            clone(PROMPT, past_key_values=DynamicCache())
            with pytest.raises(ValueError, match="has to be bound to its model"):
                clone(PROMPT, past_key_values=cache)


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


class Quantised(torch.Tensor):
    """As libraries for quantised weights have them."""


def test_models_that_cannot_be_served() -> None:
    with pytest.raises(ValueError, match="T5ForConditionalGeneration has an encoder"):
        lossless(model=tiny_model("t5"))
    model = copy.deepcopy(tiny_model("llama"))
    attention = model.model.layers[1].self_attn
    attention.k_proj = torch.nn.Sequential(attention.k_proj)
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn \(LlamaAttention\).*Sequen"):
        lossless(model=model)
    gc.collect()
    assert hooks(model) == 0
    cache = lossless(model=model, skip_layers=(1,))
    want = model.generate(PROMPT, **GREEDY)
    assert torch.equal(model.generate(PROMPT, past_key_values=cache, **GREEDY), want)
    assert len(cache.packed_layers) == 1
    weight = tiny_model("llama").model.layers[1].self_attn.k_proj.weight
    for odd in (weight.to(torch.int8), weight.detach().as_subclass(Quantised)):
        model = copy.deepcopy(tiny_model("llama"))
        model.model.layers[1].self_attn.k_proj.weight = torch.nn.Parameter(odd, False)
        with pytest.raises(ValueError, match="layers.1.self_attn .* of torch.* as a weight"):
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
    model(PROMPT, past_key_values=lossless(model=model, skip_layers=(0, 1)))
    with pytest.raises(ValueError, match="LlamaRotaryEmbedding is of the type 'dynamic'"):
        model(PROMPT, past_key_values=cache)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_half_precision(name: str, mode: str, dtype: torch.dtype) -> None:
    model = copy.deepcopy(tiny_model(name)).to(dtype)
    results = []
    with torch.no_grad():
        for cache in (DynamicCache(), lossless(mode, model=model)):
            model(PROMPT, past_key_values=cache)
            results.append(model(PROMPT[:, :5], past_key_values=cache).logits.float())
    want, got = results
    assert (got - want).norm() / want.norm() < (0.01 if dtype == torch.float16 else 0.06)


@pytest.mark.parametrize("mode", MODES)
def test_default_device_changes_nothing(mode: str) -> None:
    """As in a block that makes a model without memory."""
    model = tiny_model("llama", num_hidden_layers=3)
    rows = torch.tensor([0, 0])

    @torch.no_grad()
    def run() -> list[torch.Tensor]:
        cache = lossless(mode, model=model)
        model(PROMPT, past_key_values=cache)
        cache.reorder_cache(rows)
        cache.crop(-50)
        copies = [cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache.fork()]
        copies[2].bind(model)
        ids = PROMPT[:, :30].expand(2, -1)
        return [model(ids, past_key_values=held).logits for held in copies]

    want = run()
    with torch.device("meta"):
        got = run()
    assert all(map(torch.equal, got, want))


def test_gradients_stop_and_it_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    cache = lossless(model=model)
    for ids in (PROMPT, PROMPT[:, :3], PROMPT[:, :1]):
        model(ids, past_key_values=cache)
    (message,) = [text for text in caplog.messages if "gradients" in text]
    assert "torch.no_grad()" in message
    caplog.clear()
    with torch.no_grad():
        model(PROMPT, past_key_values=lossless(model=model))
    assert not any("gradients" in text for text in caplog.messages)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let layers think that they are on another device than the CPU; lists where they go."""
    moves: list[str] = []
    move = XQuantLayer._move

    def recorded(layer: XQuantLayer, device: torch.device | str) -> None:
        moves.append(str(device))
        move(layer, "cpu")

    monkeypatch.setattr(XQuantLayer, "_move", recorded)
    monkeypatch.setattr(XState, "device", property(lambda state: torch.device("cuda")))
    return moves


@pytest.mark.parametrize("mode", MODES)
def test_offloaded_layers_come_back(mode: str, moves: list[str]) -> None:
    model = tiny_model("llama")
    caches = [lossless(mode, model=model) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(PROMPT, past_key_values=cache)
        for layer in caches[0].layers:
            layer.offload()
        assert moves == ["cpu", "cpu"]
        for cache in caches:
            cache.crop(-20)
        got, want = (model(PROMPT[:, :5], past_key_values=cache).logits for cache in caches)
    assert torch.equal(got, want) and moves == ["cpu", "cpu", "cuda", "cuda"]


def test_offloading_between_update_and_attention_is_refused(moves: list[str]) -> None:
    model = tiny_model("llama")
    cache = lossless(model=model)
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
    layer = cache.layers[1]
    layer.offload()
    with pytest.raises(NotImplementedError, match=r"from cuda to the CPU.*offloading=True"):
        layer.attend(torch.randn(1, 4, 1, 32))
    with pytest.raises(NotImplementedError, match="offload"):
        layer.materialize(120)
