"""Everything that Transformers' caches ask of their layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.models import tiny_model, token_ids
from torch_kvq import KVQCache

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

PROMPT = token_ids(1, 120)
GREEDY = {"max_new_tokens": 30, "do_sample": False}


def packed(bits: int | str = 16, **options: Any) -> Any:
    return KVQCache(bits, quantized_start=80, residual_length=10, **options)


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
