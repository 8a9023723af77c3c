"""Everything that Transformers' caches ask of their layers."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from tests.models import tiny_config, tiny_model, token_ids
from torch_kvq import KVQCache, KVQLayer

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

PROMPT = token_ids(1, 120)
GREEDY = {"max_new_tokens": 30, "do_sample": False}
MODES = pytest.mark.parametrize("mode", [{}, {"max_cache_len": 400}], ids=["grow", "static"])

OF_OTHER_LAYERS = {
    "activate_past_recording",  # sliding windows, linear attention
    *("has_previous_state", "conv_states", "recurrent_states"),
    *("update_conv_state", "update_recurrent_state"),
    "update_indexer",  # sparse attention
    *("append", "index"),  # a list's own
}
"""What `Cache` asks only of layers that it has checked to be of another kind."""

OF_TENSORS = {
    *("cumulative_length", "max_cache_len", "device", "dtype"),
    *("num_heads", "k_head_dim", "v_head_dim"),
}
"""How Transformers' layers keep their tensors."""


def packed(bits: int | str = 16, **options: Any) -> Any:
    return KVQCache(bits, quantized_start=80, residual_length=10, **options)


@MODES
def test_layers_have_all_that_a_cache_asks_for(mode: dict[str, int]) -> None:
    """A release of Transformers that asks for more fails here."""
    layer = packed(**mode)._new_layer()
    layer.update(*torch.randn(2, 1, 2, 5, 32))
    asked = set(re.findall(r"\blayers?(?:\[\w+\])?\.(\w+)", inspect.getsource(Cache)))
    assert {"update", "crop", "offload", "prefetch", "is_initialized"} <= asked
    kind = StaticLayer if mode else DynamicLayer
    offered = {name for name in dir(kind) if not name.startswith("_")}
    missing = {name for name in asked | offered if not hasattr(layer, name)}
    assert missing <= OF_OTHER_LAYERS | OF_TENSORS
    assert issubclass(KVQLayer, CacheLayerMixin)


@MODES
@pytest.mark.parametrize("heads", [2, [2, 2]], ids=["same", "by-layer"])
def test_early_initialization(heads: int | list[int], mode: dict[str, int]) -> None:
    model = tiny_model("llama")
    cache = packed(config=model.config, **mode)
    cache.early_initialization(1, heads, 32, torch.float32, torch.device("cpu"))
    assert cache.is_initialized and cache.get_seq_length() == 0 and cache.batch_size == 1
    states = [layer.state for layer in cache.layers]
    addresses = [tensor.data_ptr() for tensor in states[0].tensors]
    got = model.generate(PROMPT, past_key_values=cache, **GREEDY)
    assert torch.equal(got, model.generate(PROMPT, **GREEDY))
    assert [layer.state for layer in cache.layers] == states
    if mode:
        assert [tensor.data_ptr() for tensor in states[0].tensors] == addresses


def test_early_initialization_of_a_cache_with_other_layers() -> None:
    model = tiny_model("gemma2", "eager")
    cache = packed(config=model.config)
    cache.early_initialization(1, 2, 32, torch.float32, torch.device("cpu"))
    got = model.generate(PROMPT, past_key_values=cache, **GREEDY)
    assert torch.equal(got, model.generate(PROMPT, **GREEDY))


def test_sizes_of_a_cache() -> None:
    cache = packed(config=tiny_config("gemma2"))
    assert cache.get_max_length() == 40, "the sliding window's"
    assert cache.get_max_length(1) == -1 and cache.batch_size == -1
    assert packed(config=tiny_config("llama"), max_cache_len=77).get_max_length() == 77
    assert cache.get_mask_sizes(3, 1) == (3, 0) and cache.get_query_offset() == 0


@MODES
def test_cache_can_be_rolled_back(mode: dict[str, int]) -> None:
    cache = packed(config=tiny_config("llama"), **mode)
    assert all(layer.is_croppable for layer in cache.layers)
    assert cache.is_compileable == bool(mode)
    cache.activate_past_recording()
    assert not any(hasattr(layer, "record_past") for layer in cache.layers)


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_assisted_decoding(name: str) -> None:
    """Layers of Transformers record their past, packed ones have it anyhow."""
    model = tiny_model(name, "eager")
    cache = packed(config=model.config)
    prompt = torch.cat((PROMPT[:, :50], PROMPT[:, :50]), 1)
    options = {"prompt_lookup_num_tokens": 12, **GREEDY}
    got = model.generate(prompt, past_key_values=cache, **options)
    assert torch.equal(got, model.generate(prompt, **options))
    assert hasattr(cache.layers[0], "record_past") == (name == "gemma2")
    assert cache.materialized == 0


@pytest.mark.parametrize("name", ["gemma2", "llama"])
@pytest.mark.parametrize("mode", [{}, {"max_cache_len": 400}], ids=["grow", "static"])
def test_forks_answer_as_copies_do(name: str, mode: dict[str, int]) -> None:
    model = tiny_model(name, "eager")
    cache = packed(4, config=model.config, **mode)
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
    forks, copies = ([make(cache) for _ in range(2)] for make in (KVQCache.fork, copy.deepcopy))
    for seed, (fork, clone) in enumerate(zip(forks, copies, strict=True)):
        prompt = torch.cat((PROMPT, token_ids(1, 20, seed=seed)), 1)
        want = model.generate(prompt, past_key_values=clone, **GREEDY)
        assert torch.equal(model.generate(prompt, past_key_values=fork, **GREEDY), want)
    assert int(cache.get_seq_length(1)) == 120 and cache.materialized == 0
    pool = cache.layers[1].state.table.pool
    del forks, fork
    assert pool.used == sum(map(len, cache.layers[1].state.table.rows))


def test_reset_static_cache_serves_another_model() -> None:
    cache = packed(static=True)
    tiny_model("llama").generate(PROMPT, past_key_values=cache, **GREEDY)
    cache.reset()
    for name, layers in (("qwen3", 2), ("llama", 3)):
        model = tiny_model(name, num_hidden_layers=layers)
        prompt = token_ids(2, 130)
        got = model.generate(prompt, past_key_values=cache, **GREEDY)
        assert torch.equal(got, model.generate(prompt, **GREEDY))
        cache.reset()


def test_layers_are_offloaded_between_calls() -> None:
    """On the CPU there is nothing to move."""
    model, cache = tiny_model("llama"), packed(config=tiny_config("llama"))
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        for index, layer in enumerate(cache.layers):
            cache.offload(index)
            layer.prefetch()
        got = model(PROMPT[:, :3], past_key_values=cache).logits
    want = model(torch.cat((PROMPT, PROMPT[:, :3]), 1)).logits[:, -3:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvq"])
def test_cache_that_offloads_within_a_call_is_refused(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves a layer away between its update and its attention, which reads it."""
    monkeypatch.setattr(torch, "Stream", mock.MagicMock)
    monkeypatch.setattr(torch.cuda, "default_stream", mock.MagicMock())
    monkeypatch.setattr("torch_kvq.cache.state.LayerState.device", torch.device("cuda"))
    monkeypatch.setattr(KVQLayer, "_move", lambda *_: None)
    model = tiny_model("llama", attention)
    cache = Cache(layers=[KVQLayer(16), KVQLayer(16)], offloading=True)
    with pytest.raises(NotImplementedError, match=r"as Transformers' Cache\(offloading=True\)"):
        model(PROMPT, past_key_values=cache)


def test_packed_cache_does_not_offload_by_itself() -> None:
    with pytest.raises(TypeError, match="offloading"):
        KVQCache(4, offloading=True)
