"""Layers that are not treated like the others."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers.cache_utils import DynamicLayer

from tests.models import tiny_config, tiny_model, token_ids
from torch_kvq import KVQCache

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

PROMPT = token_ids(1, 120)
GREEDY = {"max_new_tokens": 5, "do_sample": False}
OPTIONS = {"quantized_start": 80, "residual_length": 10}


def test_skipped_layers_are_transformers_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torch_kvq")
    model = tiny_model("llama", num_hidden_layers=4)
    cache = KVQCache(16, skip_layers=(0, -1), layer_bits={1: "4/3"}, **OPTIONS)
    model.generate(PROMPT, past_key_values=cache, **GREEDY)
    kinds = [type(layer) for layer in cache.layers]
    assert kinds[0] is kinds[3] is DynamicLayer and len(cache.packed_layers) == 2
    assert caplog.messages == [
        "2 of 4 layers are packed at 4/3 bits (1) and 16 bits (1); 2 not: skip_layers"
    ]
    assert repr(cache).startswith(
        "KVQCache(bits=16, skip_layers=(0, -1), layer_bits={1: '4/3'}, layers=4 (2 not packed), "
    )


@pytest.mark.parametrize("options", [{}, {"static": True}, {"max_cache_len": 200}], ids=str)
def test_skipped_layers_change_nothing(options: dict[str, Any]) -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    cache = KVQCache(16, skip_layers=(0,), strict=True, **OPTIONS, **options)
    expected = model.generate(PROMPT, **GREEDY)
    assert torch.equal(model.generate(PROMPT, past_key_values=cache, **GREEDY), expected)


def test_skipped_layers_without_a_configuration() -> None:
    model = tiny_model("llama", num_hidden_layers=3)
    cache = KVQCache(16, skip_layers=(0,), **OPTIONS)
    with torch.no_grad():
        for _ in range(2):
            logits = model(PROMPT, past_key_values=cache).logits
        want = model(PROMPT.repeat(1, 2)).logits[:, 120:]
    assert type(cache.layers[0]) is DynamicLayer
    torch.testing.assert_close(logits, want, rtol=1e-3, atol=1e-3)
    cache = KVQCache(16, skip_layers=(-1,), **OPTIONS)
    with pytest.raises(ValueError, match="got -1, need the model"):
        model(PROMPT, past_key_values=cache)


def test_layers_that_the_model_does_not_have() -> None:
    model = tiny_model("llama")
    cache = KVQCache(4, skip_layers=(2,))
    with pytest.raises(ValueError, match="skip_layers must name layers from -2 to 1"):
        model.generate(PROMPT, past_key_values=cache, **GREEDY)
    with pytest.raises(ValueError, match="layer_bits must name layers from -2 to 1"):
        KVQCache(4, layer_bits={-3: 16}, config=model.config)


def test_a_configuration_in_the_place_of_bits() -> None:
    with pytest.raises(ValueError, match="bits must be .* got LlamaConfig$"):
        KVQCache(tiny_config("llama"))
