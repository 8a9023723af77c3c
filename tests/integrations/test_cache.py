"""The cache of all layers: its layout, its model and its reports."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from tests.models import left_padded, tiny_config, tiny_model, token_ids
from torch_kvq import KVQCache, KVQLayer
from torch_kvq.integrations import check_transformers

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

PROMPT = token_ids(1, 120)
GREEDY = {"max_new_tokens": 5, "do_sample": False}


def packed(bits: int | str = 16, **options: Any) -> Any:
    return KVQCache(bits, quantized_start=80, residual_length=10, **options)


def test_is_a_cache_of_transformers() -> None:
    cache = KVQCache()
    assert isinstance(cache, Cache) and issubclass(KVQLayer, CacheLayerMixin)
    assert cache.get_seq_length() == 0 and len(cache) == 0 and not cache.is_compileable


def test_layout_says_what_is_not_packed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torch_kvq")
    config = tiny_config("gemma2", num_hidden_layers=4)
    cache = KVQCache("4/3", config=config)
    assert [type(layer) for layer in cache.layers] == [DynamicSlidingWindowLayer, KVQLayer] * 2
    assert caplog.messages == ["2 of 4 layers are packed at 4/3 bits; 2 not: sliding window"]
    assert cache.is_sliding == [True, False] * 2


def test_head_dims_without_a_format_keep_their_layers(caplog: pytest.LogCaptureFixture) -> None:
    cache = KVQCache(config=tiny_config("llama", hidden_size=64))
    assert all(type(layer) is DynamicLayer for layer in cache.layers)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "0 of 2 layers" in record.message and "got 16" in record.message
    model = tiny_model("llama", hidden_size=64)
    assert torch.equal(
        model.generate(PROMPT, past_key_values=cache, **GREEDY), model.generate(PROMPT, **GREEDY)
    )
    with pytest.raises(ValueError, match="must be a multiple of 16 from 32 to 512, got 16"):
        model(PROMPT, past_key_values=KVQCache())


def test_layers_can_have_options_of_their_own() -> None:
    model = tiny_model("llama")
    cache = KVQCache(2, config=model.config)
    cache.layers[0] = KVQLayer(4)
    model.generate(PROMPT, past_key_values=cache, **GREEDY)
    assert [layer.options.bits for layer in cache.layers] == ["4", "2"]


def test_sliding_layers_are_packed_without_a_layout() -> None:
    """A cache that knows no config packs every layer, whose mask has the window in it."""
    model = tiny_model("mistral-window")
    cache, whole = packed(), DynamicCache()
    with torch.no_grad():
        for tokens in (120, 1, 30, 1):
            inputs = token_ids(1, tokens, seed=tokens)
            got = model(inputs, past_key_values=cache).logits
            torch.testing.assert_close(
                got, model(inputs, past_key_values=whole).logits, rtol=1e-3, atol=1e-3
            )
    assert cache.layers[0].state.lengths.tolist() == [[0, 152, 128]]
    assert cache.materialized == 0


def test_rows_of_a_padded_batch_are_their_solo_runs() -> None:
    """At 4 bits, up to rounding in the model, which sums in another order for another batch."""
    model = tiny_model("llama")
    inputs = left_padded((90, 30, 0), 200)
    cache = packed(4)
    with torch.no_grad():
        positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        model(**inputs, position_ids=positions, past_key_values=cache)
        for row, skipped in enumerate((90, 30, 0)):
            solo = packed(4)
            model(inputs["input_ids"][row : row + 1, skipped:], past_key_values=solo)
            for layer, own in zip(cache.layers, solo.layers, strict=True):
                start, length, quantized = layer.state.lengths[row].tolist()
                assert (start, length - start, quantized) == (
                    skipped,
                    *own.state.lengths[0, 1:].tolist(),
                )
                got = layer.materialize(200)[0][row, :, skipped:]
                want = own.materialize(200 - skipped)[0][0]
                assert (got - want).norm() / want.norm() < 1e-2


def test_layers_of_another_model_are_refused() -> None:
    cache = packed()
    tiny_model("llama").generate(PROMPT, past_key_values=cache, **GREEDY)
    other = tiny_model("llama", num_hidden_layers=3)
    with pytest.raises(ValueError, match="2 layers, got one with 3"):
        other.generate(PROMPT, past_key_values=cache, **GREEDY)
    with pytest.raises(ValueError, match="2 kv heads of 32.*2 kv heads of 48"):
        tiny_model("qwen3").generate(PROMPT, past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == 124
    cache.reset()
    assert torch.equal(
        other.generate(PROMPT, past_key_values=cache, **GREEDY), other.generate(PROMPT, **GREEDY)
    )


def test_layers_beyond_the_layout_are_refused() -> None:
    cache = packed(config=tiny_config("llama"))
    with pytest.raises(ValueError, match="laid out for 2 layers, got layer_idx=2"):
        tiny_model("llama", num_hidden_layers=3)(PROMPT, past_key_values=cache)


def test_interrupted_call_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = tiny_model("llama"), packed()
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        attention = model.model.layers[1].self_attn
        with monkeypatch.context() as patch:
            patch.setattr(attention, "forward", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(PROMPT[:, :3], past_key_values=cache)
        with pytest.raises(ValueError, match="layer 0 holds 123 positions and layer 1 120"):
            model(PROMPT[:, :3], past_key_values=cache)
        cache.crop(120)
        whole = torch.cat((PROMPT, PROMPT[:, :3]), 1)
        got = model(PROMPT[:, :3], past_key_values=cache).logits
        torch.testing.assert_close(got, model(whole).logits[:, -3:], rtol=1e-4, atol=1e-4)


def test_static_cache_grows_from_one_call_to_the_next() -> None:
    model, cache = tiny_model("llama"), packed(static=True)
    first = model.generate(PROMPT, past_key_values=cache, **GREEDY)
    assert cache.options.max_cache_len == 128
    prompt = torch.cat((first, PROMPT), 1)
    got = model.generate(prompt, past_key_values=cache, **GREEDY)
    assert cache.options.max_cache_len == 256
    assert torch.equal(got, model.generate(prompt, **GREEDY))


def test_static_cache_that_is_full() -> None:
    model, cache = tiny_model("llama"), packed(max_cache_len=122)
    with pytest.raises(IndexError, match="max_cache_len=122 is too small for 123"):
        model.generate(PROMPT, past_key_values=cache, **GREEDY)
    assert cache.layers[0].state.positions == 122


def test_static_layers_that_transformers_made_do_not_grow() -> None:
    model, cache = tiny_model("gemma2", "eager"), packed(static=True)
    model.generate(PROMPT, past_key_values=cache, **GREEDY)
    with pytest.raises(ValueError, match="give the cache max_cache_len"):
        model.generate(token_ids(1, 300), past_key_values=cache, **GREEDY)


def test_static_cache_without_generate_needs_its_length() -> None:
    with pytest.raises(ValueError, match="static=True needs max_cache_len"):
        tiny_model("llama")(PROMPT, past_key_values=packed(static=True))


def test_report_and_repr_count_all_layers() -> None:
    model, cache = tiny_model("gemma2", "eager"), packed(4)
    model.generate(PROMPT, past_key_values=cache, **GREEDY)
    report = cache.memory_report()
    window = cache.layers[0]
    others = window.keys.nbytes + window.values.nbytes + window._sliding_window_tensor.nbytes
    assert report.parts["other layers"] == others
    own = sum(tensor.nbytes for tensor in cache.layers[1].state.tensors)
    assert report.total_bytes == others + own
    assert report.tokens == 124 and report.layers == 2
    assert repr(cache) == (
        f"KVQCache(bits=4, layers=2 (1 not packed), tokens=124, bytes={report.total_bytes})"
    )


def test_copy_of_a_cache_is_independent() -> None:
    model, cache = tiny_model("llama"), packed(4)
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        clone = copy.deepcopy(cache)
        model(PROMPT, past_key_values=cache)
    assert (cache.get_seq_length(), clone.get_seq_length()) == (240, 120)


def test_old_releases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "5.9.2")
    with pytest.raises(ImportError, match=r"transformers >= 5\.16, got 5\.9\.2"):
        check_transformers()


@pytest.mark.parametrize("hidden", [False, True], ids=["installed", "not-installed"])
def test_transformers_is_imported_when_it_is_used(hidden: bool) -> None:
    """Without Transformers layers and caches work too."""
    script = f"""
import sys, warnings
warnings.simplefilter("ignore")
if {hidden}:
    sys.modules["transformers"] = None
import torch, torch_kvq
layer = torch_kvq.KVQLayer(4)
layer.update(*torch.randn(2, 1, 2, 5, 32))
layer.attend(torch.randn(1, 2, 5, 32))
assert {hidden} or "transformers" not in sys.modules
cache = torch_kvq.KVQCache(4)
key, value = cache.update(*torch.randn(2, 1, 2, 5, 32), layer_idx=0)
torch.nn.functional.scaled_dot_product_attention(torch.randn(1, 2, 5, 32), key, value)
print(type(cache).__module__, cache)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    module = "cache.cache" if hidden else "integrations.transformers"
    assert result.stdout.startswith(f"torch_kvq.{module} KVQCache(bits=4, layers=1, tokens=5")
