"""The estimate is what the cache reports once it holds the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import torch_kvq
from tests.models import ARCHITECTURES, tiny_model, token_ids
from torch_kvq import KVQCache, TieredCache, XQuantCache, _extension

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

OPTIONS: dict[str, Any] = {"residual_length": 4, "quantized_start": 70}
OTHERS = ("t5", "bart", "qwen3-next", "bloom")
"""Models that need an encoder, have a state that the estimate leaves out, or take no static cache
in older releases."""

SMALL_TENSORS = 64
"""Bytes in which Transformers' layers keep their lengths."""


@pytest.mark.parametrize("more", [{}, {"max_cache_len": 400}], ids=["grow", "static"])
@pytest.mark.parametrize("tokens", [30, 80, 300])
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in OTHERS])
def test_it_is_the_report(name: str, tokens: int, more: dict[str, int]) -> None:
    # Models whose heads are all of one kind ignore the number of KV heads.
    heads = {} if name == "falcon" else {"num_key_value_heads": 4}
    model = tiny_model(name, "eager", **heads)
    cache = KVQCache("4/3", config=model.config, **OPTIONS, **more)
    with torch.no_grad():
        model(token_ids(2, tokens), past_key_values=cache)
    for layer in cache.packed_layers:
        layer.flush()
    report = cache.memory_report()
    found = torch_kvq.estimate(model.config, tokens, 2, bits="4/3", **OPTIONS, **more)
    for part in {*report.parts, *found.parts} - {"other layers"}:
        assert found.parts[part] == report.parts[part]
    assert 0 <= report.total_bytes - found.total_bytes <= SMALL_TENSORS
    assert found.fp16_bytes == report.fp16_bytes
    assert found.layers == report.layers
    assert report.tokens in (found.tokens, 0)


@pytest.mark.parametrize("tokens", [700, 5000])
def test_pages_of_a_sliding_window(tokens: int) -> None:
    layer = torch_kvq.KVQLayer(4, sliding_window=300)
    layer.update(*torch.randn(2, 3, 2, tokens, 32))
    layer.flush()
    model = tiny_model("mistral-window", sliding_window=300, num_hidden_layers=1)
    found = torch_kvq.estimate(model.config, tokens, 3, bits=4)
    assert found.by_layer[0] == layer.memory_parts()


@pytest.mark.parametrize(("argument", "value"), [("context", 0), ("batch", -1)])
def test_bad_arguments(argument: str, value: int) -> None:
    arguments = {"context": 10, "batch": 1} | {argument: value}
    with pytest.raises(ValueError, match=f"{argument} must be at least 1, got {value}"):
        torch_kvq.estimate(tiny_model("llama").config, **arguments)


def test_dtype() -> None:
    config = tiny_model("llama").config
    exact = {
        dtype: torch_kvq.estimate(config, 100, dtype=dtype).parts["exact"]
        for dtype in (torch.float32, torch.float16)
    }
    assert exact[torch.float32] == 2 * exact[torch.float16]


def assert_is_the_report(cache: Any, model: Any, tokens: int, **arguments: Any) -> None:
    """The estimate for a cache is its report after a prompt of two rows."""
    with torch.no_grad():
        model(token_ids(2, tokens), past_key_values=cache)
    for layer in cache.packed_layers:
        layer.flush()
    report = cache.memory_report()
    found = torch_kvq.estimate(model.config, tokens, 2, cache=type(cache), **arguments)
    own = {"other layers"}
    for one, other in zip(found.by_layer, report.by_layer, strict=True):
        assert {**one, **dict.fromkeys(own, 0)} == {**other, **dict.fromkeys(own, 0)}
    assert found.parts.get("archive") == report.parts.get("archive")
    assert found.disk_bytes == report.disk_bytes
    assert 0 <= report.total_bytes - found.total_bytes <= SMALL_TENSORS
    assert (found.fp16_bytes, found.tokens) == (report.fp16_bytes, report.tokens)


@pytest.mark.parametrize("tokens", [30, 100, 300, 700])
@pytest.mark.parametrize("far", ["fp8-int4", "tile4"])
@pytest.mark.parametrize(
    "options",
    [{"near_ratio": 0.3}, {"near_ratio": 1.0, "sink_tokens": 0}, {"skip_layers": (0,)}],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_tiers(name: str, options: dict[str, Any], far: str, tokens: int) -> None:
    model = tiny_model(name, "eager", num_key_value_heads=4)
    given = {"far": far, "window": 8, "quantized_start": 80, "promote": False, **options}
    assert_is_the_report(TieredCache(config=model.config, **given), model, tokens, **given)


@pytest.mark.skipif(not _extension.is_compiled, reason="an archive is compiled")
@pytest.mark.parametrize("tokens", [30, 128, 300])
@pytest.mark.parametrize(
    "options", [{}, {"archive_in_memory": True}, {"archive_budget": 200_000}], ids=str
)
def test_archives(options: dict[str, Any], tokens: int) -> None:
    model = tiny_model("llama")
    cache = TieredCache(config=model.config, **options)
    with torch.no_grad():
        model(token_ids(2, tokens), past_key_values=cache)
    cache.promotion.archive.flush()
    report = cache.memory_report()
    found = torch_kvq.estimate(model.config, tokens, 2, cache=TieredCache, **options)
    assert found == report


def test_no_archive_is_made(tmp_path: Any) -> None:
    config, path = tiny_model("llama").config, tmp_path / "archive"
    found = torch_kvq.estimate(config, 300, cache=TieredCache, archive=path)
    assert found.disk_bytes > 0 and not path.exists()
    with pytest.raises(ValueError, match="promote=False keeps no archive"):
        torch_kvq.estimate(config, 300, cache=TieredCache, archive=path, promote=False)


@pytest.mark.parametrize("tokens", [30, 100, 300])
@pytest.mark.parametrize(
    "options", [{"bits": 4}, {"bits": 2, "axis": "channel"}, {"bits": 16}], ids=str
)
@pytest.mark.parametrize("mode", ["x", "cl", "latent", "auto"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma3"])
def test_layer_inputs(name: str, mode: str, options: dict[str, Any], tokens: int) -> None:
    model = tiny_model(name, "eager", num_key_value_heads=2 if name == "llama" else 4)
    given = {"mode": mode, "residual_length": 20, "first_layers": 1, **options}
    assert_is_the_report(XQuantCache(model=model, **given), model, tokens, **given)


def test_what_is_no_cache() -> None:
    with pytest.raises(TypeError, match="cache must be a class of caches"):
        torch_kvq.estimate(tiny_model("llama").config, 100, cache="tiered")
