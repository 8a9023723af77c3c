"""Options of a layer."""

from __future__ import annotations

from typing import Any

import pytest

from torch_kvq import KVQLayer
from torch_kvq.cache.options import LayerOptions


@pytest.mark.parametrize(
    ("bits", "expected"), [(4, (4, 4)), (2, (2, 2)), ("4/3", (4, 3)), ("3", (3, 3)), (16, (16, 16))]
)
def test_presets(bits: int | str, expected: tuple[int, int]) -> None:
    options = LayerOptions.parse(bits)
    assert (options.key_bits, options.value_bits) == expected


def test_bits_of_keys_and_values_override_the_preset() -> None:
    options = LayerOptions.parse(4, value_bits=2)
    assert (options.key_bits, options.value_bits, options.bits) == (4, 2, "4/2")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"bits": 5}, ValueError, ["5"]),
        ({"bits": "4/3/2"}, ValueError, ["bits", "4/3/2"]),
        ({"bits": None}, ValueError, ["bits", "None"]),
        ({"bits": "four"}, ValueError, ["bits", "four"]),
        ({"bits": "3/4"}, ValueError, ["key_bits=3", "value_bits=4"]),
        ({"key_bits": 2, "value_bits": 3}, ValueError, ["key_bits=2", "value_bits=3"]),
        ({"bits": 16, "value_bits": 4}, ValueError, ["key_bits=16", "value_bits=4"]),
        ({"sink_tokens": -1}, ValueError, ["sink_tokens", "-1"]),
        ({"residual_length": 1.5}, TypeError, ["residual_length", "1.5"]),
        ({"quantized_start": True}, TypeError, ["quantized_start", "True"]),
        ({"max_cache_len": 0}, ValueError, ["max_cache_len", "0"]),
    ],
    ids=str,
)
def test_bad_options_are_named(
    options: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as raised:
        KVQLayer(**options)
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize("quantized", [0, 64, 70, 192])
@pytest.mark.parametrize("start", [0, 100, 256])
def test_next_tile_is_when_the_rule_says(quantized: int, start: int) -> None:
    options = LayerOptions(4, 4, residual_length=16, quantized_start=start)
    due = options.next_tile(quantized)
    assert options.quantized(due, quantized) > quantized
    assert options.quantized(due - 1, quantized) == quantized
