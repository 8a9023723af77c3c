"""Compiled decoding of a model: graphs, and the tokens of the run without compiling."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import CompileConfig

from tests.compile.decoding import PROMPT, Compiled, decode, model
from tests.models import left_padded, token_ids
from torch_kvq import KVQCache

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

IDS = token_ids(1, PROMPT)
PADDED = left_padded((70, 0), PROMPT)
FEW = {"quantized_start": 80, "residual_length": 10}


def make_cache(name: str = "llama", layers: int = 1, **options: Any) -> Any:
    return KVQCache(4, config=model(name, layers).config, **options)


def only_decoding(forward: Any, layers: int = 1) -> Any:
    """The model as it is for a prompt, else ``forward``."""

    def step(input_ids: torch.Tensor, **options: Any) -> Any:
        function = model(layers=layers).forward if input_ids.shape[1] > 1 else forward
        return function(input_ids=input_ids, **options)

    return step


@pytest.mark.parametrize("options", [{"max_cache_len": 448}, {}], ids=["static", "growing"])
def test_prompt_and_decoding_are_two_graphs(options: dict[str, int]) -> None:
    """Whatever the cache grows to, and for the next cache as well."""
    wanted = decode(model(layers=2).forward, make_cache(layers=2, **options), 300, input_ids=IDS)
    forward = Compiled(model(layers=2).forward)
    for _ in range(2):
        cache = make_cache(layers=2, **options)
        assert torch.equal(decode(forward, cache, 300, input_ids=IDS), wanted)
        assert forward.graphs == 2
        assert cache.materialized == 0 and cache.layers[1].state.lengths[0, 2] > 128


@pytest.mark.parametrize("options", [{"max_cache_len": 256}, {}], ids=["static", "growing"])
def test_inductor(options: dict[str, int]) -> None:
    plain, forward = model(layers=2).forward, Compiled(model(layers=2).forward, "inductor")
    wanted = decode(plain, make_cache(layers=2, **FEW, **options), 100, input_ids=IDS)
    step = only_decoding(forward, layers=2)
    for _ in range(2):
        tokens = decode(step, make_cache(layers=2, **FEW, **options), 100, input_ids=IDS)
        assert torch.equal(tokens, wanted)
    assert forward.graphs <= 2


@pytest.mark.parametrize("options", [{"max_cache_len": 256}, {}], ids=["static", "growing"])
def test_frozen_weights(options: dict[str, int]) -> None:
    """Inductor moves more of a step than without: positions are those before the token."""
    frozen = torch.compile(model().forward, fullgraph=True, options={"freezing": True})
    logits = []
    for forward in (model().forward, frozen):
        cache = make_cache(**options)
        with torch.no_grad():
            model()(input_ids=IDS, past_key_values=cache)
            step = [forward(input_ids=IDS[:, :1], past_key_values=cache).logits for _ in range(3)]
        logits.append(torch.cat(step))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


def test_growing_cache_lasts_a_thousand_steps() -> None:
    """More pages than PyTorch would compile graphs for one function."""
    forward = Compiled(model().forward)
    cache = make_cache()
    tokens = decode(forward, cache, 1000, input_ids=IDS)
    assert torch.equal(tokens, decode(model().forward, make_cache(), 1000, input_ids=IDS))
    assert len(cache.layers[0].state.table.rows[0]) > torch._dynamo.config.recompile_limit
    assert forward.graphs == 2


@pytest.mark.parametrize("options", [{"max_cache_len": 256}, {}], ids=["static", "growing"])
def test_prompt_that_is_not_compiled(options: dict[str, int]) -> None:
    """The layers need not be known before."""
    forward, plain = Compiled(model().forward), model().forward
    step = only_decoding(forward)
    wanted = decode(plain, KVQCache(4, **FEW, **options), 100, input_ids=IDS)
    assert torch.equal(decode(step, KVQCache(4, **FEW, **options), 100, input_ids=IDS), wanted)
    assert forward.graphs <= 2


@pytest.mark.parametrize("options", [{"max_cache_len": 256}, {}], ids=["static", "growing"])
def test_padding(options: dict[str, int]) -> None:
    forward = Compiled(model().forward)
    tokens = []
    for function in (model().forward, forward):
        mask = PADDED["attention_mask"]
        cache = make_cache(**FEW, **options)
        tokens.append(decode(function, cache, 100, mask, input_ids=PADDED["input_ids"]))
        assert cache.layers[0].state.lengths[:, 0].tolist() == [70, 0]
    assert torch.equal(*tokens)
    assert forward.graphs <= 3


def test_sliding_window_that_gives_pages_up() -> None:
    options = {"residual_length": 4, "sink_tokens": 2, "quantized_start": 32}
    name = "mistral-long-window"
    wanted = decode(model(name).forward, make_cache(name, **options), 200, input_ids=IDS)
    forward, cache = Compiled(model(name).forward), make_cache(name, **options)
    assert torch.equal(decode(forward, cache, 200, input_ids=IDS), wanted)
    assert cache.layers[0].state.first_position > 0 and forward.graphs == 2


def test_forks_and_cuts_between_compiled_steps() -> None:
    """A copy goes by a name of its own."""
    tokens = []
    for forward in (model().forward, Compiled(model().forward)):
        cache = make_cache(**FEW)
        decode(forward, cache, 80, input_ids=IDS)
        fork = cache.fork()
        cache.crop(-30)
        for each in (cache, fork):
            tokens.append(decode(forward, each, 80, input_ids=IDS[:, :1]))
    assert torch.equal(tokens[0], tokens[2]) and torch.equal(tokens[1], tokens[3])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_gradient_modes(mode: Any) -> None:
    tokens = []
    for forward in (model().forward, Compiled(model().forward, "aot_eager")):
        cache = make_cache(**FEW)
        with mode():
            output = forward(input_ids=IDS, past_key_values=cache)
            for _ in range(3):
                token = output.logits[:, -1:].argmax(-1)
                output = forward(input_ids=token, past_key_values=cache)
        tokens.append(output.logits.detach())
    torch.testing.assert_close(*tokens)


def test_unknown_layers_are_made_before_the_graph() -> None:
    with pytest.raises(RuntimeError, match=r"config=model\.config"):
        decode(Compiled(model().forward), KVQCache(4), 0, input_ids=IDS)
    in_parts = torch.compile(model().forward, backend="eager")
    wanted = decode(model().forward, KVQCache(4), 0, input_ids=IDS)
    assert torch.equal(decode(in_parts, KVQCache(4), 0, input_ids=IDS), wanted)


@pytest.mark.parametrize("options", [{"max_cache_len": 256}, {"static": True}], ids=str)
def test_generate_compiles_a_static_cache(options: dict[str, Any]) -> None:
    """It would on an accelerator; a flag of Transformers' own tests lets it do so here."""
    from torch._dynamo.utils import counters

    compiled = CompileConfig(fullgraph=True, dynamic=False, mode=None, backend="eager")
    compiled._compile_all_devices = True
    arguments = {"do_sample": False, "max_new_tokens": 120, "min_new_tokens": 120}
    wanted = model().generate(IDS, past_key_values=KVQCache(4, **FEW, **options), **arguments)
    for _ in range(2):
        cache = KVQCache(4, **FEW, **options)
        got = model().generate(IDS, past_key_values=cache, compile_config=compiled, **arguments)
        assert torch.equal(got, wanted)
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_recipe_of_the_readme() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (recipe,) = [part for part in re.findall(r"```python\n(.*?)```", text, re.S) if "step(" in part]
    names = {"torch": torch, "KVQCache": KVQCache, "model": model(), "input_ids": IDS}
    exec(recipe.replace("fullgraph=True", 'fullgraph=True, backend="eager"'), names)
    wanted = decode(model().forward, make_cache(), 20, input_ids=IDS)
    assert torch.equal(names["token"], wanted[:, -1:])


def test_recipe_of_int8_weights() -> None:
    """It runs; how far its predictions are off is the benchmark's check."""
    pytest.importorskip("torchao", reason="the recipe needs torchao")
    text = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
    (recipe,) = [part for part in re.findall(r"```python\n(.*?)```", text, re.S) if "step(" in part]
    names = {"torch": torch, "KVQCache": KVQCache, "model": deepcopy(model()), "input_ids": IDS}
    with torch._inductor.config.patch(freezing=False):  # the recipe changes it for good
        exec(recipe, names)
    assert names["cache"].get_seq_length() == PROMPT + 20
    assert names["cache"].materialized == 0
