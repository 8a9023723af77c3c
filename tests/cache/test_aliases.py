"""Names of options that other caches use."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from torch_kvq.cache import aliases
from torch_kvq.cache.cache import KVQCache


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"nbits": 4}, {"bits": 4}),
        ({"nbits": "4"}, {"bits": "4"}),
        ({"kv_bits": "4/3"}, {"bits": "4/3"}),
        ({"bits": 2, "residual_length": 128}, {"bits": 2, "residual_length": 128}),
        ({"quantized_kv_start": 0}, {"quantized_start": 0}),
        ({"quantized_start": 512}, {"quantized_start": 512}),
        ({"nbits": 4, "bits": "4", "kv_bits": "4/4"}, {"bits": 4}),
        ({"nbits": None, "axis_key": None, "q_group_size": None}, {}),
    ],
    ids=str,
)
def test_other_names(given: dict[str, Any], expected: dict[str, Any]) -> None:
    assert aliases.translate(given) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nbits": 4, "bits": 3}, ["'nbits'", "'bits'", "4", "3"]),
        ({"kv_bits": 4, "nbits": "4/3"}, ["'kv_bits'", "'nbits'", "'4/3'"]),
        ({"quantized_start": 1, "quantized_kv_start": 2}, ["'quantized_kv_start'", "1", "2"]),
        ({"axis_key": 0}, ["'axis_key'", "own scale", "0"]),
        ({"axis_value": 1}, ["'axis_value'", "own scale", "1"]),
        ({"q_group_size": 64}, ["'q_group_size'", "own scale", "64"]),
        ({"kv_group_size": 64}, ["'kv_group_size'", "own scale", "64"]),
    ],
    ids=str,
)
def test_what_cannot_be_meant(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        aliases.translate(given)
    assert all(word in str(raised.value) for word in words), raised.value


def test_dtype_and_device_are_the_model_s(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torch_kvq")
    given = {"device": "cpu", "compute_dtype": torch.float16, "nbits": 2}
    assert aliases.translate(given) == {"bits": 2}
    assert [record.levelno for record in caplog.records] == [logging.INFO] * 2
    assert "'device'" in caplog.messages[0] and "the model's" in caplog.messages[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nbits": 4}, ["'nbits'", "say bits=4"]),
        ({"kv_bits": 3}, ["'kv_bits'", "say bits=3"]),
        ({"quantized_kv_start": 9}, ["say quantized_start=9"]),
        ({"q_group_size": 64}, ["'q_group_size'", "own scale", "64"]),
        ({"axis_key": 1}, ["'axis_key'", "own scale"]),
        ({"device": "cpu"}, ["'device'", "the model's"]),
        ({"backend": "quanto"}, ["'backend'", "cache_config", "quanto"]),
        ({"window": 3}, ["'window'", "help(KVQCache)"]),
    ],
    ids=str,
)
def test_the_constructor_says_what_to_use(given: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(TypeError) as raised:
        KVQCache(**given)
    assert all(word in str(raised.value) for word in words), raised.value
