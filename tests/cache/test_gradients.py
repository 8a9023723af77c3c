"""Gradients stop at a packed cache, which says so once."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch

from torch_kvq import KVQLayer
from torch_kvq.cache.cache import KVQCache


def use(cache: KVQCache, tokens: int, requires_grad: bool) -> list[torch.Tensor]:
    """Update and attend in two layers."""
    out = []
    for layer_idx in range(2):
        key, value = torch.randn(2, 1, 2, tokens, 32).requires_grad_(requires_grad)
        cache.update(key, value, layer_idx=layer_idx)
        query = torch.randn(1, 4, tokens, 32, requires_grad=requires_grad)
        out.append(cache.layers[layer_idx].attend(query, softcap=3.0, sinks=query[0, :, 0, 0]))
    return out


@pytest.mark.parametrize("first", [100, 1])
def test_a_cache_warns_once(first: int, caplog: pytest.LogCaptureFixture) -> None:
    cache = KVQCache(16, quantized_start=80, residual_length=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tokens in (first, 1, 30):
            assert not any(out.requires_grad for out in use(cache, tokens, requires_grad=True))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "without their gradients" in record.message and "torch.no_grad()" in record.message
    use(KVQCache(16), 10, requires_grad=True)
    assert len(caplog.records) == 2, "every cache says it for itself"


def test_inference_does_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    use(KVQCache(16), 100, requires_grad=False)
    with torch.no_grad():
        use(KVQCache(16), 100, requires_grad=False)
    assert not caplog.records


def test_first_attention_has_the_gradients_of_the_query(caplog: pytest.LogCaptureFixture) -> None:
    layer = KVQLayer(4)
    layer.update(*torch.randn(2, 1, 2, 100, 32, requires_grad=True))
    query = torch.randn(1, 4, 100, 32, requires_grad=True)
    layer.attend(query, is_causal=True).sum().backward()
    assert query.grad is not None and query.grad.any()
    assert len(caplog.records) == 1
