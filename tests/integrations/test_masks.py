"""Masks as Transformers makes them reach packed attention through every attention function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from torch.nn.attention.flex_attention import create_block_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from tests.cache.test_masks import HEADS, POSITIONS, QUERIES, SHAPES, _additive, allowed
from tests.integrations import scenarios
from tests.integrations.scenarios import LONG
from tests.models import tiny_model
from torch_kvq import KVQCache, KVQLayer

pytestmark = pytest.mark.filterwarnings(
    "ignore:`past_key_values`:FutureWarning",
    "ignore:_compile flag:DeprecationWarning",
    "ignore:`torch.jit.script_method`:DeprecationWarning",
    "ignore:flex_attention called without:UserWarning",
)


def attention_of(name: str) -> Any:
    return ALL_ATTENTION_FUNCTIONS.get_interface(name, modeling_llama.eager_attention_forward)


def called(name: str, query: torch.Tensor, layer: KVQLayer, new: Any, mask: Any) -> torch.Tensor:
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    module.training = False
    out, _ = attention_of(name)(module, query, *layer.update(*new), mask, scaling=32**-0.5)
    assert layer.materialized == 0
    return out.transpose(1, 2)


@pytest.mark.parametrize("is_bool", [True, False], ids=["bool", "additive"])
@pytest.mark.parametrize("name", ["sdpa", "eager", "kvq"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.count("-") == 3])
def test_attention_functions(shape: str, name: str, is_bool: bool) -> None:
    key, value = torch.randn(2, 2, 2, POSITIONS, 32)
    query = torch.randn(2, HEADS, QUERIES, 32)
    kept = allowed(shape)
    mask = kept if is_bool else _additive(kept, torch.finfo(torch.float32).min)
    padding = torch.zeros(2, 1, 1, 1)
    padding[0] = 30 if shape.startswith("batch") else 0
    layer = KVQLayer(16, quantized_start=80, residual_length=10)
    past = POSITIONS - QUERIES
    first = (torch.arange(past) >= padding).expand(-1, 1, QUERIES, -1)
    prompt = (key[:, :, :past], value[:, :, :past])
    called(name, query, layer, prompt, _additive(first, torch.finfo(torch.float32).min))
    out = called(name, query, layer, (key[:, :, past:], value[:, :, past:]), mask)
    want = F.scaled_dot_product_attention(query, key, value, kept, enable_gqa=True)
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("heads", [None, HEADS])
def test_block_mask(heads: int | None) -> None:
    """Of flex attention, whose masks are functions."""
    key, value = torch.randn(2, 2, 2, POSITIONS, 32)
    query = torch.randn(2, HEADS, QUERIES, 32)
    past = POSITIONS - QUERIES

    def seen(row: Any, head: Any, question: Any, position: Any) -> Any:
        return (position <= question + past) & ((position % 7 != head) | (position == past))

    layer = KVQLayer(16, quantized_start=80, residual_length=10)
    layer.update(key[:, :, :past], value[:, :, :past])
    layer.flush()
    mask = create_block_mask(seen, 2, heads, QUERIES, POSITIONS, device="cpu")
    new = (key[:, :, past:], value[:, :, past:])
    out = called("flex_attention", query, layer, new, mask)
    grid = torch.meshgrid(*map(torch.arange, (2, heads or 1, QUERIES, POSITIONS)), indexing="ij")
    want = F.scaled_dot_product_attention(query, key, value, seen(*grid), enable_gqa=True)
    torch.testing.assert_close(out, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("scenario", [scenarios.padded, scenarios.chunked, scenarios.beams])
def test_flex_attention(scenario: Any) -> None:
    model = tiny_model("llama", "flex_attention")
    cache = KVQCache(16, quantized_start=80, residual_length=10, strict=True)
    # Without a compiler, which would take minutes for the kernels of other caches.
    with torch.compiler.set_stance("force_eager"):
        got = scenario(model, cache, LONG)
    assert torch.equal(got, scenario(tiny_model("llama"), None, LONG))
