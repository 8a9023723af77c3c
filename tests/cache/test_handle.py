"""Handles: attended packed, decoded and counted where that cannot be."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_kvq import KVQLayer
from torch_kvq.cache.handle import KVQHandle


def filled(tokens: int = 200, **options: object) -> tuple[KVQLayer, KVQHandle, KVQHandle, Tensor]:
    """A layer after its prompt and a second update, its handles, and its keys and values."""
    data = torch.randn(2, 1, 2, tokens, 32, generator=torch.Generator().manual_seed(0))
    layer = KVQLayer(16, quantized_start=80, residual_length=10, **options)
    layer.update(*data[:, :, :, :-20])
    key, value = layer.update(*data[:, :, :, -20:])
    return layer, key, value, data


def test_looks_like_a_tensor() -> None:
    layer, key, value, _ = filled()
    assert key.shape == value.shape == (1, 2, 200, 32)
    assert key.size(2) == 200 and key.size() == key.shape and len(key) == 1
    assert key.dim() == key.ndim == 4 and key.numel() == 12800
    assert key.dtype == torch.float32 and key.device == torch.device("cpu")
    assert repr(value) == "KVQHandle(values, shape=(1, 2, 200, 32), dtype=torch.float32)"
    assert layer.materialized == 0


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 256}], ids=["grow", "static"])
def test_scaled_dot_product_attention_is_packed(options: dict[str, int]) -> None:
    layer, key, value, data = filled(**options)
    query = torch.randn(1, 4, 20, 32)
    columns = key.shape[2]
    mask = torch.ones(20, columns, dtype=torch.bool).tril(180)
    out = F.scaled_dot_product_attention(query, key, value, mask, scale=0.2, enable_gqa=True)
    want = F.scaled_dot_product_attention(
        query, *data, attn_mask=mask[:, :200], scale=0.2, enable_gqa=True
    )
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
    assert layer.materialized == 0


def test_first_attention_through_the_function() -> None:
    layer = KVQLayer(4)
    data = torch.randn(2, 1, 2, 300, 32)
    query = torch.randn(1, 2, 300, 32)
    key, value = layer.update(*data)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(out, F.scaled_dot_product_attention(query, *data, is_causal=True))
    assert layer.state is not None and layer.state.lengths.tolist() == [[0, 300, 192]]


def test_causal_mask_of_the_function_starts_at_the_first_key() -> None:
    layer, key, value, data = filled()
    query = torch.randn(1, 2, 20, 32)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(out, F.scaled_dot_product_attention(query, *data, is_causal=True))
    assert layer.materialized == 1


def test_other_code_gets_tensors() -> None:
    layer, key, value, data = filled()
    query = torch.randn(1, 2, 1, 32)
    assert torch.equal(query @ key.transpose(2, 3), query @ data[0].mT)
    assert torch.equal(torch.matmul(query, key.mT), query @ data[0].mT)
    assert torch.equal(torch.cat([value, value], 2), data[1].repeat(1, 1, 2, 1))
    assert torch.equal(key[:, 0], data[0][:, 0])
    assert torch.equal(key * 2.0, data[0] * 2) and torch.equal(2.0 * key, data[0] * 2)
    assert torch.equal(key + value, data[0] + data[1]) and torch.equal(-key, -data[0])
    assert torch.equal(query * key, query * data[0])
    assert layer.materialized == 1, "both handles of an update are decoded at once"


def test_older_handle_stands_for_what_it_stood_for() -> None:
    layer, key, value, data = filled()
    layer.update(*torch.randn(2, 1, 2, 1, 32))
    query = torch.randn(1, 2, 1, 32)
    out = F.scaled_dot_product_attention(query, key, value)
    assert torch.equal(out, F.scaled_dot_product_attention(query, *data))
    assert layer.materialized == 1


def test_static_handle_is_padded_to_capacity() -> None:
    _, key, _, data = filled(max_cache_len=256)
    assert key.shape == (1, 2, 256, 32)
    assert torch.equal(key.dense(), F.pad(data[0], (0, 0, 0, 56)))


def test_strict_layer_raises() -> None:
    layer = KVQLayer(4, strict=True)
    key, _ = layer.update(*torch.randn(2, 1, 2, 300, 32))
    assert key.dense().shape == (1, 2, 300, 32), "nothing is packed in the first call"
    layer.attend(torch.randn(1, 2, 1, 32))
    key, value = layer.update(*torch.randn(2, 1, 2, 1, 32))
    with pytest.raises(RuntimeError, match="strict=True"):
        key.transpose(1, 2)
    F.scaled_dot_product_attention(torch.randn(1, 2, 1, 32), key, value)
    assert layer.materialized == 0


def test_layer_gives_handles_of_what_it_holds() -> None:
    layer, _, _, data = filled()
    assert layer.keys is not None and layer.values is not None
    assert layer.keys.matches(layer.values)
    assert torch.equal(layer.values.dense(), data[1])
    assert KVQLayer(4).keys is None


def test_handles_can_be_copied() -> None:
    _, key, _, data = filled()
    assert torch.equal(copy.deepcopy(key).dense(), data[0])
