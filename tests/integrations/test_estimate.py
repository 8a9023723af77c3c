"""The estimate is what the cache reports once it holds the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import torch_kvq
from tests.models import ARCHITECTURES, tiny_model, token_ids
from torch_kvq import KVQCache

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
