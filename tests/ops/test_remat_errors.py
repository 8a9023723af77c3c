"""Bad input of the operators on cached inputs: an error with the argument's name and the value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_kvq import reference

Arguments = dict[str, Any]


def valid() -> Arguments:
    """Arguments of `remat_attention` with everything that is optional."""
    return {
        "query": torch.zeros(2, 4, 1, 32),
        "records": [torch.zeros(2, 3, 4352, dtype=torch.uint8) for _ in range(2)],
        "value_records": [torch.zeros(2, 3, 2242, dtype=torch.uint8)],
        "exact": torch.zeros(2, 80, 128),
        "value_exact": torch.zeros(2, 80, 64),
        "lengths": torch.tensor([[0, 150, 128], [3, 150, 128]], dtype=torch.int32),
        "key_weight": torch.zeros(64, 128),
        "value_weight": torch.zeros(96, 64),
        "key_bias": torch.zeros(64),
        "value_bias": torch.zeros(96),
        "key_norm": torch.zeros(32),
        "cos": torch.zeros(1, 200, 32),
        "sin": torch.zeros(1, 200, 32),
        "attn_mask": torch.zeros(2, 1, 1, 150),
        "bits": [4, 4],
        "value_bits": [4],
        "kv_heads": 2,
        "value_axis": "channel",
        "sinks": torch.zeros(4),
    }


def put(**values: Any) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update(values)


def apply(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Arguments], None]:
    return lambda arguments: arguments.update({name: function(arguments[name])})


def records(*shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


SHAPES = [
    (put(records=[], bits=[]), r"records must hold a tensor for each of bits, got 0 .*bits=\[\]"),
    (put(bits=[4]), r"records must hold a tensor for each of bits, got 2 .*bits=\[4\]"),
    (put(bits=[4, 5]), "bits must be 2, 3, 4, 8 or 16, got 5"),
    (put(bits=[4, 3]), r"records\[1\].shape\[2\] must be 3328 \(record_bytes\)"),
    (put(axis="row"), "axis must be 'token' or 'channel', got 'row'"),
    (put(value_axis="token"), r"value_records\[0\].shape\[2\] must be 2176"),
    (put(value_bits=[]), r"value_records must hold .*got 1 tensors and value_bits=\[\]"),
    (put(value_records=[records(2, 4, 2242)]), r"value_records\[0\].shape\[1\] must be 3"),
    (put(records=[records(2, 3, 4352), records(1, 3, 4352)]), r"records\[1\].shape\[0\] must be 2"),
    (put(records=[records(2, 3, 4352, dtype=torch.int8)] * 2), r"records\[0\] must be torch.uint8"),
    (put(value_records=[], value_bits=[]), r"value_weight.shape\[1\] must be 128"),
    (put(value_exact=None), "value_exact belongs to value_records, got none"),
    (apply("exact", lambda x: x[:1]), r"exact.shape\[0\] must be 2"),
    (apply("exact", lambda x: x[..., :64]), r"exact.shape\[2\] must be 128"),
    (apply("exact", Tensor.double), "exact must be float32"),
    (apply("value_exact", lambda x: x[:, :7]), r"value_exact.shape\[1\] must be 80"),
    (apply("key_weight", Tensor.double), "key_weight must be float32.*torch.float64"),
    (apply("value_weight", Tensor.half), "value_weight must be torch.float32"),
    (apply("key_weight", lambda x: x[:63]), r"key_weight.shape\[0\] must be a multiple of 2"),
    (put(kv_heads=0), "kv_heads must be at least 1, got 0"),
    (apply("key_bias", lambda x: x[:32]), r"key_bias.shape\[0\] must be 64"),
    (apply("value_bias", lambda x: x[None]), "value_bias must have 1 dimensions"),
    (apply("key_norm", lambda x: x[:16]), r"key_norm.shape\[0\] must be 32 \(key dim\)"),
    (put(norm_eps=-1.0), "norm_eps must not be negative, got -1.0"),
    (put(sin=None), "cos and sin must both be given"),
    (apply("sin", lambda x: x[:, :5]), r"sin.shape\[1\] must be 200"),
    (put(cos=torch.zeros(3, 200, 32), sin=torch.zeros(3, 200, 32)), r"cos.shape\[0\] must be 1 or"),
    (put(cos=torch.zeros(1, 200, 31), sin=torch.zeros(1, 200, 31)), r"cos.shape\[2\] must be even"),
    (put(cos=torch.zeros(1, 200, 64), sin=torch.zeros(1, 200, 64)), r"at most 32 \(key dim\)"),
    (apply("query", lambda x: x[..., :16]), r"query.shape\[3\] must be 32"),
    (apply("query", lambda x: x[:, :3]), "query heads must be a multiple of 2 kv heads, got 3"),
    (apply("lengths", Tensor.long), "lengths must be torch.int32"),
    (apply("lengths", lambda x: x[:1]), r"lengths.shape\[0\] must be 2"),
    (apply("sinks", lambda x: x[:3]), r"sinks.shape\[0\] must be 4"),
    (put(sliding_window=0), "sliding_window must be at least 1, got 0"),
    (put(softcap=-1.0), "softcap must be positive, got -1.0"),
    (put(attn_mask=torch.zeros(3, 1, 1, 150)), r"attn_mask.shape\[0\] must be 1 or 2"),
    (put(absorb_key=True), "absorb_key must be False or None .*got True"),
]
DATA = [
    (put(attn_mask=torch.zeros(1, 1, 1, 149)), r"attn_mask.shape\[3\] must be at least 150"),
    (
        put(cos=torch.zeros(1, 149, 32), sin=torch.zeros(1, 149, 32)),
        r"cos.shape\[1\] must be at least 150",
    ),
]
LENGTHS = [(-1, 150, 128), (0, 150, 200), (0, 150, 10), (0, 400, 320), (0, 300, 192)]


@pytest.mark.parametrize("operator", ("reference", "registered"))
@pytest.mark.parametrize(("change", "message"), SHAPES + DATA)
def test_bad_input(change: Callable[[Arguments], None], message: str, operator: str) -> None:
    arguments = valid()
    change(arguments)
    called = reference.remat_attention if operator == "reference" else torch.ops.kvq.remat_attention
    with pytest.raises(ValueError, match=message):
        called(**arguments)


def test_valid_arguments_are_valid() -> None:
    assert torch.ops.kvq.remat_attention(**valid())[0].shape == (2, 4, 1, 48)


@pytest.mark.parametrize(("change", "message"), SHAPES)
def test_tracing_sees_the_same_error(change: Callable[[Arguments], None], message: str) -> None:
    arguments = valid()
    change(arguments)
    with FakeTensorMode() as mode:

        def fake(value: Any) -> Any:
            if isinstance(value, list):
                return [fake(part) for part in value]
            return mode.from_tensor(value) if isinstance(value, Tensor) else value

        with pytest.raises(ValueError, match=message):
            torch.ops.kvq.remat_attention(**{name: fake(x) for name, x in arguments.items()})


@pytest.mark.parametrize("row", LENGTHS)
def test_lengths_outside_their_buffers(row: tuple[int, int, int]) -> None:
    arguments = valid()
    arguments["lengths"][1] = torch.tensor(row)
    with pytest.raises(IndexError, match=rf"lengths\[1\] = \(start {row[0]}, length {row[1]}"):
        torch.ops.kvq.remat_attention(**arguments)
