"""Graphs break where layer inputs are caught and stored, and are compiled once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch._dynamo.testing import CompileCounterWithBackend

from tests.compile.decoding import PROMPT, decode, model
from tests.models import token_ids
from torch_kvq import XQuantCache

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

IDS = token_ids(1, PROMPT)


def test_graphs_serve_all_steps_and_the_next_cache() -> None:
    owner = model(layers=2)

    def make() -> Any:
        return XQuantCache(4, mode="cl", first_layers=1, residual_length=10, model=owner)

    wanted = decode(owner.forward, make(), 60, input_ids=IDS)
    counter = CompileCounterWithBackend("eager")
    forward = torch.compile(owner.forward, backend=counter)
    decode(forward, make(), 3, input_ids=IDS)
    graphs = counter.frame_count
    assert 1 < graphs < 40
    cache = make()
    assert torch.equal(decode(forward, cache, 60, input_ids=IDS), wanted)
    assert counter.frame_count == graphs and cache.materialized == 0
    assert cache.layers[1].state.quantized == 128


def test_one_graph_is_refused_with_a_reason() -> None:
    owner = model(layers=2)
    whole = torch.compile(owner.forward, fullgraph=True, backend="eager")
    cache = XQuantCache(4, mode="x", model=owner)
    with pytest.raises(RuntimeError, match="layer inputs are caught outside of compiled graphs"):
        decode(whole, cache, 0, input_ids=IDS)
