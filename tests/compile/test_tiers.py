"""Compiled decoding with two tiers, whose tokens come back between the steps of a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from tests.compile.decoding import PROMPT, Compiled, decode, model
from tests.models import left_padded, token_ids
from torch_kvq import TieredCache, TieredLayer, _extension

if not _extension.is_compiled:
    pytest.skip("an archive needs the compiled part", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

IDS = token_ids(1, PROMPT)
PADDED = left_padded((70, 0), PROMPT)
SMALL = {"window": 10, "quantized_start": 80, "near_ratio": 0.2}
PROMOTE = pytest.mark.parametrize("promote", [False, "sync", True])


def make_cache(promote: Any, layers: int = 2) -> Any:
    """A cache to which tokens come back at nearly every step, if any do."""
    config = model(layers=layers).config
    return TieredCache(config=config, promote=promote, margin=-20.0, cooldown=1, **SMALL)


def settled(forward: Any) -> Any:
    """The model, after which all tokens that were found are read.

    So the thread of ``promote=True`` cannot change in which step they come back.
    """

    def step(input_ids: Tensor, past_key_values: Any, **options: Any) -> Any:
        output = forward(input_ids=input_ids, past_key_values=past_key_values, **options)
        if past_key_values.promotion is not None:
            past_key_values.promotion.promoter.wait()
        return output

    return step


@PROMOTE
def test_prompt_and_decoding_are_two_graphs(promote: Any) -> None:
    """Whatever becomes near or far, and for the next cache as well."""
    plain = make_cache(promote)
    wanted = decode(settled(model(layers=2).forward), plain, 300, input_ids=IDS)
    forward = Compiled(model(layers=2).forward)
    for _ in range(2):
        cache = make_cache(promote)
        assert torch.equal(decode(settled(forward), cache, 300, input_ids=IDS), wanted)
        assert forward.graphs == 2
        assert cache.materialized == 0 and cache.layers[1].state.lengths[0, 2] > 256
        assert cache.promoted == plain.promoted
    assert bool(plain.promoted) == bool(promote)


def test_the_thread_may_be_late() -> None:
    """Then tokens may come back in other steps than without compiling; graphs stay two."""
    forward, cache = Compiled(model(layers=2).forward), make_cache(True)
    decode(forward, cache, 100, input_ids=IDS)
    assert forward.graphs == 2 and cache.promoted > 0
    archive = cache.promotion.archive.layer(1)
    assert archive.tokens == cache.get_seq_length() == PROMPT + 100


def test_inductor() -> None:
    """Of the steps: inductor uses the memory of keys again that the archive was given."""
    plain = settled(model().forward)
    wanted = decode(plain, make_cache(True, 1), 100, input_ids=IDS)
    forward = Compiled(model().forward, "inductor")
    compiled = settled(forward)

    def step(input_ids: Tensor, past_key_values: Any) -> Any:
        function = plain if input_ids.shape[1] > 1 else compiled
        return function(input_ids=input_ids, past_key_values=past_key_values)

    for _ in range(2):
        cache = make_cache(True, 1)
        assert torch.equal(decode(step, cache, 100, input_ids=IDS), wanted)
        assert cache.promoted > 0
    assert forward.graphs <= 2


def test_padding() -> None:
    mask, tokens = PADDED["attention_mask"], []
    forward = Compiled(model().forward)
    for function in (model().forward, forward):
        cache = make_cache("sync", 1)
        tokens.append(decode(function, cache, 100, mask, input_ids=PADDED["input_ids"]))
        assert cache.layers[0].state.lengths[:, 0].tolist() == [70, 0]
    assert torch.equal(*tokens)
    assert forward.graphs <= 3


def test_forks_rows_and_cuts_between_compiled_steps() -> None:
    tokens = []
    forward = Compiled(model().forward)
    for function in (model().forward, forward):
        cache = make_cache("sync", 1)
        decode(function, cache, 80, input_ids=IDS)
        fork = cache.fork()
        cache.crop(-30)
        fork.batch_repeat_interleave(2)
        for each, rows in ((cache, 1), (fork, 2)):
            tokens.append(decode(function, each, 80, input_ids=IDS[:, :1].repeat(rows, 1)))
        assert fork.promotion.archive.layer(0).rows == 2
    assert torch.equal(tokens[0], tokens[2]) and torch.equal(tokens[1], tokens[3])


def test_layer_of_a_module() -> None:
    """As an argument, it needs no setting of PyTorch."""

    def step(layer: TieredLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer.update(key, value)
        return layer.attend(query)

    compiled = Compiled(step)
    for _ in range(2):
        layer, other = TieredLayer(**SMALL), TieredLayer(**SMALL)
        for _ in range(300):
            query, (key, value) = torch.randn(1, 4, 1, 64), torch.randn(2, 1, 2, 1, 64)
            out = compiled(layer, query, key, value)
            assert torch.equal(out, step(other, query, key, value))
        assert layer.state.lengths.tolist() == [[0, 300, 256]]
    assert compiled.graphs <= 3
