"""Layers that are not treated like the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torch_kvq.cache.cache import KVQCache
from torch_kvq.cache.options import LayerOptions
from torch_kvq.cache.policy import LayerPolicy

COMMON = LayerOptions(4, 4, residual_length=10)


def resolved(layers: int, **arguments: Any) -> list[str | None]:
    chosen = LayerPolicy.parse(**arguments).resolve(COMMON, layers)
    assert all(options is None or options.residual_length == 10 for options in chosen)
    return [options and options.bits for options in chosen]


def test_nothing_is_the_common_options() -> None:
    assert resolved(2) == ["4", "4"]
    assert LayerPolicy.parse().resolve(COMMON, 1)[0] is COMMON


def test_layers_count_from_both_ends() -> None:
    assert resolved(4, skip_layers=(0, -1)) == [None, "4", "4", None]
    assert resolved(4, skip_layers=[-4], layer_bits={-1: 16}) == [None, "4", "4", "16"]


def test_bits_are_those_of_a_cache() -> None:
    assert resolved(3, layer_bits={0: "4/3", 1: 2}) == ["4/3", "2", "4"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"skip_layers": 0}, TypeError, ["skip_layers", "sequence", "0"]),
        ({"skip_layers": "0"}, TypeError, ["skip_layers", "'0'"]),
        ({"skip_layers": ("0",)}, TypeError, ["skip_layers", "'0'"]),
        ({"skip_layers": (True,)}, TypeError, ["skip_layers", "True"]),
        ({"layer_bits": [4, 4]}, TypeError, ["layer_bits", "[4, 4]"]),
        ({"layer_bits": {"0": 4}}, TypeError, ["layer_bits", "'0'"]),
        ({"layer_bits": {0: 8}}, ValueError, ["layer_bits[0]", "8"]),
        ({"layer_bits": {3: "3/4"}}, ValueError, ["layer_bits[3]", "value_bits=4"]),
        ({"layer_bits": {1: None}}, ValueError, ["layer_bits[1]", "None"]),
        ({"skip_layers": (1,), "layer_bits": {1: 4}}, ValueError, ["once", "layer 1"]),
        ({"skip_layers": (1, 1)}, ValueError, ["once", "layer 1"]),
    ],
    ids=str,
)
def test_bad_arguments_are_named(
    arguments: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as raised:
        KVQCache(**arguments)
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"skip_layers": (4,)}, ["skip_layers", "-4 to 3", "4 layers", "got 4"]),
        ({"layer_bits": {-5: 4}}, ["layer_bits", "got -5"]),
        ({"skip_layers": (0,), "layer_bits": {-4: 4}}, ["once", "layer 0"]),
        ({"skip_layers": (3, -1)}, ["once", "layer 3"]),
    ],
    ids=str,
)
def test_layers_that_the_model_does_not_have(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        LayerPolicy.parse(**arguments).resolve(COMMON, 4)
    assert all(word in str(raised.value) for word in words), raised.value


def test_cache_without_a_model() -> None:
    cache = KVQCache(2, quantized_start=80, residual_length=10, skip_layers=(0,), layer_bits={1: 4})
    data = torch.randn(2, 1, 2, 120, 32)
    for layer_idx in range(3):
        cache.update(*data, layer_idx=layer_idx)
        cache.layers[layer_idx].flush()
    assert [layer.options.bits for layer in cache.layers] == ["16", "4", "2"]
    assert torch.equal(cache.layers[0].materialize(120)[0], data[0])
    assert "bits=2, skip_layers=(0,), layer_bits={1: '4'}, layers=3" in repr(cache)


def test_counting_from_the_last_layer_needs_a_model() -> None:
    with pytest.raises(ValueError, match="got -1, need the model"):
        KVQCache(skip_layers=(-1,)).update(*torch.randn(2, 1, 2, 5, 32), layer_idx=0)
