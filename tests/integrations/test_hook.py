"""What ``generate`` tells a cache, and caches that it makes by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig
from transformers.generation.utils import GenerationMixin

from tests.integrations.scenarios import inputs
from tests.models import tiny_config, tiny_model, token_ids
from torch_kvq import KVQCache, TieredCache, XQuantCache, _extension
from torch_kvq.integrations import transformers_generate

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

PROMPT = token_ids(1, 120)
GREEDY = {"max_new_tokens": 5, "do_sample": False}
OPTIONS = {"quantized_start": 80, "residual_length": 10}


def named(cache_config: dict[str, Any]) -> dict[str, Any]:
    return {"cache_implementation": "quantized", "cache_config": cache_config}


def made_by(model: Any, **options: Any) -> tuple[torch.Tensor, Any]:
    """Tokens, and the cache that ``generate`` made."""
    given = inputs(model, PROMPT)
    result = model.generate(**given, return_dict_in_generate=True, **GREEDY, **options)
    return result.sequences, result.get("cache", result.get("past_key_values"))


@pytest.mark.parametrize("backend", ["kvq", "KVQ"])
def test_cache_by_name(backend: str) -> None:
    model = tiny_model("llama")
    options = {"backend": backend, "nbits": "16", **OPTIONS}
    tokens, cache = made_by(model, **named(options))
    assert isinstance(cache, KVQCache) and cache.options.key_bits == 16
    assert cache.options.residual_length == 10
    assert torch.equal(tokens, model.generate(PROMPT, **GREEDY))
    assert options["backend"] == backend, "the caller's dict is not consumed"


@pytest.mark.skipif(not _extension.is_compiled, reason="an archive is compiled")
@pytest.mark.parametrize(
    "options",
    [
        {"far": "tile4", "promote": "sync", "margin": -20.0, "cooldown": 1},
        {"archive_in_memory": True},
        {"promote": False},
    ],
    ids=str,
)
def test_two_tiers_by_name(options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    given = {"near_ratio": 1.0, "quantized_kv_start": 80, "residual_length": 10, **options}
    tokens, cache = made_by(model, **named({"backend": "kvq-tiered", **given}))
    assert type(cache) is TieredCache and cache.options.far == options.get("far", "fp8-int4")
    assert cache.options.residual_length == 10 and cache.options.quantized_start == 80
    assert (cache.promotion is None) == (options.get("promote") is False)
    assert cache.layers[1].state.lengths[0, 2] > 0
    assert torch.equal(tokens, model.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize("mode", ["x", "cl", "latent"])
def test_layer_inputs_by_name(mode: str) -> None:
    model = tiny_model("llama")
    options = {"backend": "kvq-x", "nbits": 16, "mode": mode, "residual_length": 10}
    tokens, cache = made_by(model, **named(options))
    assert type(cache) is XQuantCache and (cache.mode, cache.options.bits) == (mode, 16)
    assert cache.layers[1].state.quantized == 64
    assert torch.equal(tokens, model.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize(
    ("backend", "options", "error", "message"),
    [
        ("kvq-tiered", {"nbits": 4}, TypeError, "'nbits'"),
        ("kvq-tiered", {"q_group_size": 64}, ValueError, "no meaning for backend 'kvq-tiered'"),
        ("kvq-tiered", {"far": "int8"}, ValueError, "far must be"),
        ("kvq-x", {"far": "tile4"}, TypeError, "'far'"),
        ("kvq-x", {"q_group_size": 64}, ValueError, "'kvq-x': every 64 elements have a scale"),
        ("kvq-x", {"nbits": 5}, ValueError, "bits must be one of"),
    ],
)
def test_options_that_another_backend_has(
    backend: str, options: dict[str, Any], error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        tiny_model("llama").generate(PROMPT, **named({"backend": backend, **options}), **GREEDY)


def test_cache_by_name_takes_all_options() -> None:
    model = tiny_model("llama")
    _, cache = made_by(
        model,
        **named(
            {
                "backend": "kvq",
                "kv_bits": 4,
                "layer_bits": {0: 16},
                "quantized_kv_start": 80,
                "device": "cpu",
                "static": True,
            }
        ),
    )
    assert [layer.options.bits for layer in cache.layers] == ["16", "4"]
    assert cache.options.quantized_start == 80 and cache.static


def test_cache_by_name_in_a_generation_configuration() -> None:
    """The model's own, which stays as it is for the next call."""
    model = tiny_model("llama")
    before = model.generation_config
    name = named({"backend": "kvq", "nbits": 4, **OPTIONS})
    model.generation_config = GenerationConfig(**{**before.to_dict(), **name})
    try:
        caches = [made_by(model)[1] for _ in range(2)]
        assert model.generation_config.cache_implementation == "quantized"
        with pytest.raises(ValueError, match="cache_implementation"):
            model.generate(PROMPT, past_key_values=KVQCache(4), **GREEDY)
    finally:
        model.generation_config = before
    assert all(isinstance(cache, KVQCache) for cache in caches) and caches[0] is not caches[1]
    options = GenerationConfig(**{**before.to_dict(), **name, **GREEDY})
    result = model.generate(PROMPT, generation_config=options, return_dict_in_generate=True)
    assert isinstance(result.get("cache", result.get("past_key_values")), KVQCache)


def test_no_cache_is_made_where_none_is_wanted() -> None:
    model = tiny_model("llama")
    name = named({"backend": "kvq", "nbits": 4})
    tokens, cache = made_by(model, use_cache=False, **name)
    assert cache is None
    assert torch.equal(tokens, model.generate(PROMPT, **GREEDY))


@pytest.mark.parametrize(
    ("cache_config", "backend"),
    [
        (None, "quanto"),
        ({"nbits": 4}, "quanto"),
        ({"backend": "hqq"}, "hqq"),
        ({"backend": "kvq-z"}, "kvq-z"),
    ],
    ids=str,
)
def test_other_quantised_caches_are_transformers_own(
    cache_config: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(backend: str, **options: Any) -> None:
        raise NotImplementedError(backend)

    monkeypatch.setattr("transformers.generation.utils.QuantizedCache", made)
    with pytest.raises(NotImplementedError, match=backend):
        tiny_model("llama").generate(PROMPT, **named(cache_config), **GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"q_group_size": 32}, "q_group_size.*32"),
        ({"nbits": 4, "bits": 3}, "'nbits'.*'bits'"),
        ({"nbits": 8}, "8"),
    ],
)
def test_options_by_name_that_do_not_exist(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model("llama").generate(PROMPT, **named({"backend": "kvq", **options}), **GREEDY)
    with pytest.raises(TypeError, match="'sinks'"):
        tiny_model("llama").generate(PROMPT, **named({"backend": "kvq", "sinks": 4}), **GREEDY)


def test_quantised_cache_of_an_encoder_decoder() -> None:
    """By name and as it is: cross-attention keeps a cache of Transformers."""
    model = tiny_model("bart")
    expected = model.generate(**inputs(model, PROMPT), **GREEDY)
    tokens, cache = made_by(model, **named({"backend": "kvq", "nbits": 16, **OPTIONS}))
    assert torch.equal(tokens, expected)
    assert isinstance(cache.self_attention_cache, KVQCache)
    own = KVQCache(16, static=True, strict=True, **OPTIONS)
    tokens, cache = made_by(model, past_key_values=own)
    assert torch.equal(tokens, expected)
    assert cache.self_attention_cache is own and own.options.max_cache_len == 128
    assert type(cache.cross_attention_cache) is DynamicCache


def test_rows_of_an_encoder_decoder() -> None:
    """EncoderDecoderCache crops and selects rows of what it takes for a DynamicCache."""
    model = tiny_model("bart")
    cache = EncoderDecoderCache(KVQCache(16, **OPTIONS), DynamicCache(config=model.config))
    model.generate(**inputs(model, PROMPT), past_key_values=cache, **GREEDY)
    held = cache.get_seq_length()
    cache.batch_repeat_interleave(2)
    cache.crop(-7)
    cache.batch_select_indices(torch.tensor([1]))
    assert cache.get_seq_length() == held - 7
    assert cache.self_attention_cache.layers[0].batch_size == 1


def test_layers_that_share_keys_need_no_layout() -> None:
    """A cache that saw a call before ``generate`` has no layers for those that store nothing."""
    model = tiny_model("gemma3n")
    cache = KVQCache(16, **OPTIONS)
    with torch.no_grad():
        model(PROMPT[:, :100], past_key_values=cache)
    assert len(cache.layers) == 2
    tokens = model.generate(PROMPT, past_key_values=cache, **GREEDY)
    assert torch.equal(tokens, model.generate(PROMPT, **GREEDY))


@pytest.fixture
def fresh_hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], None]]:
    """Let ``generate`` have a method of another release, to which nothing is known yet."""
    original = GenerationMixin._prepare_cache_for_generation._kvq_original
    monkeypatch.setattr(transformers_generate, "_warned", [])

    def replace(method: Any) -> None:
        monkeypatch.setattr(GenerationMixin, "_prepare_cache_for_generation", method(original))

    yield replace
    monkeypatch.undo()
    KVQCache()
    assert hasattr(GenerationMixin._prepare_cache_for_generation, "_kvq_original")


def other_names(original: Any) -> Any:
    def prepare(self: Any, *, config: Any, **others: Any) -> Any:
        return original(self, config, **others)

    return prepare


@pytest.mark.parametrize("method", [other_names, lambda original: None], ids=["other", "gone"])
def test_unknown_release_warns_once(
    fresh_hook: Any, method: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fresh_hook(method)
    caches = [KVQCache(16, config=tiny_config("llama")) for _ in range(3)]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "is not known" in record.message and "config=model.config" in record.message
    model = tiny_model("llama")
    with torch.no_grad():
        assert model(PROMPT, past_key_values=caches[0]).logits.shape[1] == 120


def test_unknown_release_generates_with_a_cache_that_knows_its_model(fresh_hook: Any) -> None:
    """The hook is all that is missing: attention is packed as ever."""

    def same_with_other_names(original: Any) -> Any:
        def prepare(self: Any, *positional: Any, **named: Any) -> Any:
            return original(self, *positional, **named)

        return prepare

    model = tiny_model("llama")
    expected = model.generate(PROMPT, **GREEDY)
    fresh_hook(same_with_other_names)
    cache = KVQCache(16, config=model.config, strict=True, **OPTIONS)
    assert torch.equal(model.generate(PROMPT, past_key_values=cache, **GREEDY), expected)
