"""Bad input is named and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_kvq import KVQLayer
from torch_kvq.cache.cache import KVQCache


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def layer_with_tokens(**options: Any) -> KVQLayer:
    layer = KVQLayer(16, quantized_start=80, residual_length=10, **options)
    layer.update(*normal(2, 2, 2, 150, 32))
    layer.attend(normal(2, 4, 1, 32))
    layer.update(*normal(2, 2, 2, 1, 32))
    return layer


def memory_of(layer: KVQLayer) -> list[Tensor]:
    """A copy of all bytes of a layer; memory that was never written may hold NaN."""
    return [tensor.clone().view(torch.uint8) for tensor in layer.state.tensors]


NEW: list[tuple[Callable[[], Any], type[Exception], list[str]]] = [
    (lambda: normal(2, 3, 2, 1, 32), ValueError, ["batch 2", "batch 3"]),
    (lambda: normal(2, 2, 4, 1, 32), ValueError, ["2 kv heads", "4 kv heads"]),
    (lambda: normal(2, 2, 2, 1, 64), ValueError, ["of 32 and 32", "of 64 and 64"]),
    (lambda: normal(2, 2, 2, 1, 32, dtype=torch.float16), ValueError, ["float32", "float16"]),
    (lambda: (normal(2, 2, 1, 32), normal(2, 2, 2, 32)), ValueError, ["value.shape[2]"]),
    (lambda: normal(2, 2, 2, 32), ValueError, ["key must have 4 dimensions"]),
    (lambda: (None, None), TypeError, ["key must be a tensor", "NoneType"]),
    (lambda: normal(2, 2, 2, 1, 32).to("meta"), ValueError, ["on cpu", "on meta"]),
]


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 400}], ids=["grow", "static"])
@pytest.mark.parametrize(("new", "error", "words"), NEW)
def test_update_that_does_not_fit(
    new: Callable[[], Any], error: type[Exception], words: list[str], options: dict[str, int]
) -> None:
    layer = layer_with_tokens(**options)
    before = memory_of(layer)
    with pytest.raises(error) as raised:
        layer.update(*new())
    assert all(word in str(raised.value) for word in words), raised.value
    assert all(map(torch.equal, memory_of(layer), before))
    layer.update(*normal(2, 2, 2, 5, 32))
    assert layer.get_seq_length() == 156


@pytest.mark.parametrize(
    ("new", "error", "words"),
    [
        (lambda: normal(2, 1, 2, 5, 16), ValueError, ["key.shape[-1]", "16"]),
        (lambda: normal(2, 1, 2, 5, 40), ValueError, ["multiple of 16", "40"]),
        (lambda: normal(2, 1, 2, 5, 528), ValueError, ["32 to 512", "528"]),
        (lambda: normal(2, 1, 2, 5, 32).double(), ValueError, ["key", "float64"]),
        (lambda: normal(2, 1, 2, 5, 32).long(), ValueError, ["key", "int64"]),
        (lambda: normal(2, 0, 2, 5, 32), ValueError, ["key", "empty"]),
    ],
)
def test_first_update_that_cannot_be_stored(
    new: Callable[[], Any], error: type[Exception], words: list[str]
) -> None:
    layer = KVQLayer(4)
    with pytest.raises(error) as raised:
        layer.update(*new())
    assert all(word in str(raised.value) for word in words), raised.value
    assert layer.get_seq_length() == 0 and not layer.is_initialized


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"query": normal(1, 4, 1, 32)}, "query"),
        ({"query": normal(2, 3, 1, 32)}, "heads"),
        ({"query": normal(2, 4, 1, 64)}, "query"),
        ({"attn_mask": torch.ones(1, 100, dtype=torch.bool)}, "attn_mask"),
        ({"attn_mask": torch.ones(3, 1, 1, 151, dtype=torch.bool)}, "attn_mask"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"softcap": -1.0}, "softcap"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"precision": "best"}, "precision"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_first", [True, False])
def test_attention_that_does_not_fit(arguments: dict[str, Any], word: str, is_first: bool) -> None:
    layer = layer_with_tokens()
    if is_first:
        layer = KVQLayer(4)
        layer.update(*normal(2, 2, 2, 151, 32))
    arguments = {"query": normal(2, 4, 1, 32)} | arguments
    with pytest.raises(ValueError, match=word):
        layer.attend(**arguments)
    assert layer.get_seq_length() == 151
    layer.attend(normal(2, 4, 1, 32))


def test_attention_without_tokens() -> None:
    with pytest.raises(ValueError, match=r"attend\(\) needs tokens"):
        KVQLayer(4).attend(normal(1, 2, 1, 32))


@pytest.mark.parametrize("tokens", [251, 400])
def test_static_layer_that_is_full(tokens: int) -> None:
    layer = KVQLayer(16, quantized_start=80, residual_length=10, max_cache_len=250)
    with pytest.raises(IndexError, match=f"max_cache_len=250 is too small for {tokens}"):
        layer.update(*normal(2, 1, 2, tokens, 32))
    data = normal(2, 1, 2, 250, 32)
    layer.update(*data[:, :, :, :248])
    layer.update(*data[:, :, :, 248:])
    with pytest.raises(IndexError, match="max_cache_len=250 is too small for 251"):
        layer.update(*normal(2, 1, 2, 1, 32))
    assert torch.equal(layer.materialize(250)[0], data[0])


def test_rows_and_tokens_that_do_not_exist() -> None:
    layer = layer_with_tokens()
    with pytest.raises(IndexError):
        layer.reorder_cache(torch.tensor([0, 2]))
    with pytest.raises(IndexError, match="at least one row"):
        layer.batch_select_indices(torch.tensor([False, False]))
    with pytest.raises(IndexError, match="tokens=-152 removes more than the 151"):
        layer.crop(-152)
    layer.crop(500)
    assert layer.get_seq_length() == 151 and layer.batch_size == 2


def test_cache_of_another_model() -> None:
    cache = KVQCache(4)
    for layer_idx in range(2):
        cache.update(*normal(2, 1, 2, 5, 32), layer_idx=layer_idx)
    with pytest.raises(ValueError, match="2 kv heads.*4 kv heads"):
        cache.update(*normal(2, 1, 4, 5, 32), layer_idx=0)
    for layer_idx in range(2):
        cache.update(*normal(2, 1, 2, 7, 32), layer_idx=layer_idx)
    with pytest.raises(ValueError, match="12 positions in 2 layers, got layer_idx=2"):
        cache.update(*normal(2, 1, 2, 7, 32), layer_idx=2)


def test_call_that_ended_between_layers() -> None:
    cache = KVQCache(4)
    for layer_idx in range(3):
        cache.update(*normal(2, 1, 2, 5, 32), layer_idx=layer_idx)
    cache.update(*normal(2, 1, 2, 2, 32), layer_idx=0)
    with pytest.raises(ValueError, match="layer 0 holds 7 positions and layer 1 5"):
        cache.update(*normal(2, 1, 2, 2, 32), layer_idx=0)
    cache.crop(5)
    cache.update(*normal(2, 1, 2, 2, 32), layer_idx=0)
    assert cache.get_seq_length() == 7


def test_static_cache_needs_its_length() -> None:
    with pytest.raises(ValueError, match="max_cache_len"):
        KVQCache(4, static=True)
