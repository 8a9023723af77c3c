"""Bad input to the operators of two tiers: an error that names the argument and the value."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import cases, tiers
from tests.cases import Case
from tests.ops.test_errors import (
    Arguments,
    Bad,
    apply,
    assert_rejected,
    assert_rejected_in_tracing,
    both,
    sized,
    use,
    write,
)
from torch_kvq import reference

CASE = Case("tier-errors", key_dim=64, value_dim=96, starts=(0, 5), steps=(300, 40), queries=2)


@functools.cache
def _valid(op: str) -> Arguments:
    key, value = torch.randn(2, 3, 64, 64), torch.randn(2, 3, 64, 96)
    if op == "quantize_far":
        return {"key": key, "value": value}
    if op == "dequantize_far":
        return {"tiles": reference.quantize_far(key, value), "key_dim": 64, "value_dim": 96}
    state, _ = tiers.make_tiers(CASE, "fp8-int4")
    mask = torch.ones(2, 4, 2, 340, dtype=torch.bool)
    return {
        **state._asdict(),
        "block_table": state.block_table.clamp(min=0),
        "query": cases.make_query(CASE),
        "attn_mask": mask,
        "sinks": torch.zeros(4),
        "candidates": 8,
    }


def valid(op: str) -> Arguments:
    """Arguments that an operator accepts, to be changed at will."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in _valid(op).items()}


def _records() -> list[Bad]:
    return [
        Bad("quantize_far", ("key", "(3, 64, 64)"), apply("key", lambda x: x[0])),
        Bad("quantize_far", ("key", "float64"), apply("key", Tensor.double)),
        Bad("quantize_far", ("value", "float16"), apply("value", Tensor.half)),
        Bad("quantize_far", ("value.shape[1]", "2"), sized("value", 1, 2)),
        Bad(
            "quantize_far", ("key.shape[2]", "63"), both(sized("key", 2, 63), sized("value", 2, 63))
        ),
        Bad("quantize_far", ("key.shape[-1]", "24"), sized("key", 3, 24)),
        Bad("quantize_far", ("value.shape[-1]", "1024"), sized("value", 3, 1024)),
        Bad("dequantize_far", ("tiles", "int8"), apply("tiles", Tensor.char)),
        Bad("dequantize_far", ("tiles", "dimensions"), apply("tiles", lambda x: x[0])),
        Bad("dequantize_far", ("tiles.shape[2]", "record_bytes"), use(key_dim=128)),
        Bad("dequantize_far", ("key_dim", "60"), use(key_dim=60)),
        Bad("dequantize_far", ("value_dim", "90"), use(value_dim=90)),
        Bad("dequantize_far", ("dtype", "float64"), use(dtype=torch.float64)),
    ]


def _tensors() -> list[Bad]:
    op = "tiered_attention"
    return [
        Bad(op, ("near_key", "(2, 2"), apply("near_key", lambda x: x[..., 0])),
        Bad(op, ("near_key", "float64"), apply("near_key", Tensor.double)),
        Bad(op, ("near_value", "bfloat16"), apply("near_value", Tensor.bfloat16)),
        Bad(op, ("near_value.shape[0]", "1"), sized("near_value", 0, 1)),
        Bad(op, ("near_value.shape[2]", "900"), sized("near_value", 2, 900)),
        Bad(op, ("value_dim", "100"), sized("near_value", 3, 100)),
        Bad(op, ("near_index", "int64"), apply("near_index", Tensor.long)),
        Bad(op, ("near_index", "dimensions"), apply("near_index", lambda x: x[0])),
        Bad(op, ("near_index.shape[1]", "1"), sized("near_index", 1, 1)),
        Bad(op, ("near_index.shape[2]", "3"), sized("near_index", 2, 3)),
        Bad(op, ("near_count", "int64"), apply("near_count", Tensor.long)),
        Bad(op, ("near_count.shape[0]", "3"), sized("near_count", 0, 3)),
        Bad(op, ("tiles", "int8"), apply("tiles", Tensor.char)),
        Bad(op, ("tiles.shape[1]", "1"), sized("tiles", 1, 1)),
        Bad(op, ("tiles.shape[2]", "128"), sized("tiles", 2, 128)),
        Bad(op, ("block_table", "int64"), apply("block_table", Tensor.long)),
        Bad(op, ("block_table.shape[0]", "3"), sized("block_table", 0, 3)),
        Bad(op, ("promoted", "int32"), apply("promoted", Tensor.int)),
        Bad(op, ("promoted.shape[1]", "4"), sized("promoted", 1, 4)),
        Bad(op, ("promoted.shape[2]", "2", "max_pages"), sized("promoted", 2, 2)),
        Bad(op, ("lengths", "int64"), apply("lengths", Tensor.long)),
        Bad(op, ("lengths.shape[1]", "2"), sized("lengths", 1, 2)),
        Bad(op, ("far", "'fp4'"), use(far="fp4")),
        Bad(op, ("tiles.shape[2]", "record_bytes"), use(far="tile4", balance=torch.ones(2, 2, 64))),
        Bad(op, ("balance", "tile4", "(2, 2, 64)"), use(balance=torch.ones(2, 2, 64))),
        Bad(op, ("sink_tokens", "-1"), use(sink_tokens=-1)),
        Bad(op, ("candidates", "65"), use(candidates=65)),
        Bad(op, ("candidates", "-1"), use(candidates=-1)),
        Bad(op, ("query.shape[3]", "128"), sized("query", 3, 128)),
        Bad(op, ("query heads", "3"), sized("query", 1, 3)),
        Bad(op, ("attn_mask.shape[1]", "2"), sized("attn_mask", 1, 2)),
        Bad(op, ("attn_mask.shape[3]", "340"), sized("attn_mask", 3, 339), reads_data=True),
        Bad(op, ("sinks.shape[0]", "2"), sized("sinks", 0, 2)),
        Bad(op, ("softcap", "0"), use(softcap=0.0)),
        Bad(op, ("precision", "'exakt'"), use(precision="exakt")),
    ]


def _near_slot(arguments: Arguments, far: bool) -> tuple[int, ...]:
    """A slot of the last head whose token is far, or none of the far ones."""
    start, length, quantized = arguments["lengths"][1].tolist()
    count = int(arguments["near_count"][1, 1])
    tokens = arguments["near_index"][1, 1, :count]
    is_far = (tokens >= 4) & (tokens < 4 + quantized)
    wanted = is_far if far else (tokens >= 0) & ~is_far
    return (1, 1, int(wanted.nonzero()[0]))


def _unset_bit(arguments: Arguments) -> None:
    arguments["promoted"][1, 1, :] = 0


def _unfilled_slot(arguments: Arguments) -> None:
    arguments["near_index"][_near_slot(arguments, far=True)] = -1


def _second_slot(arguments: Arguments) -> None:
    index = arguments["near_index"]
    index[_near_slot(arguments, far=False)] = index[_near_slot(arguments, far=True)].clone()


def _second_recent_slot(arguments: Arguments) -> None:
    index, far = arguments["near_index"], _near_slot(arguments, far=True)
    place = int(index[far]) - 4
    arguments["promoted"][1, 1, place // 64] &= ~(torch.tensor(1) << place % 64)
    index[far] = index[_near_slot(arguments, far=False)].clone()


def _bookkeeping() -> list[Bad]:
    op = "tiered_attention"

    def bad(words: tuple[str, ...], change: Any, error: type[Exception] = IndexError) -> Bad:
        return Bad(op, words, change, error, reads_data=True)

    return [
        bad(("lengths[1]", "-1"), write("lengths", (1, 0), -1)),
        bad(("lengths[1]", "400"), write("lengths", (1, 2), 400)),
        bad(("lengths[0]", "3 pages"), both(sized("block_table", 1, 3), sized("promoted", 2, 3))),
        bad(("block_table[0, 0]", "999"), write("block_table", (0, 0), 999)),
        bad(("near_count[0, 1]", "-3"), write("near_count", (0, 1), -3)),
        bad(("near_count[0, 1]", "9999"), write("near_count", (0, 1), 9999)),
        bad(("near_index[1, 0, 2]", "335"), write("near_index", (1, 0, 2), 335)),
        bad(("near_index[1, 0, 2]", "-2"), write("near_index", (1, 0, 2), -2)),
        bad(("near_index[1, 1", "promoted", "twice"), _unset_bit, ValueError),
        bad(("promoted[1, 1]", "not near"), _unfilled_slot, ValueError),
        bad(("near_index[1, 1", "two slots"), _second_slot, ValueError),
        bad(("near_index[1, 1", "two slots", "counts"), _second_recent_slot, ValueError),
    ]


TABLE = [*_records(), *_tensors(), *_bookkeeping()]


@pytest.mark.parametrize("op", sorted({bad.op for bad in TABLE}))
def test_the_unchanged_arguments_are_valid(op: str) -> None:
    getattr(reference, op)(**valid(op))
    getattr(torch.ops.kvq, op)(**valid(op))


@pytest.mark.parametrize("library", (reference, torch.ops.kvq), ids=("reference", "operator"))
@pytest.mark.parametrize("bad", TABLE, ids=str)
def test_bad_input_is_an_error(bad: Bad, library: Any) -> None:
    assert_rejected(bad, valid(bad.op), library)


@pytest.mark.parametrize("bad", [bad for bad in TABLE if not bad.reads_data], ids=str)
def test_tracing_sees_the_same_error(bad: Bad) -> None:
    assert_rejected_in_tracing(bad, valid(bad.op))


def test_tile4_needs_its_balance() -> None:
    state, balance = tiers.make_tiers(CASE, "tile4")
    assert balance is not None
    query = cases.make_query(CASE)
    for library in (reference, torch.ops.kvq):
        with pytest.raises(ValueError, match=r"balance belongs to far='tile4'.*none"):
            library.tiered_attention(query, *state, far="tile4")
        with pytest.raises(ValueError, match=r"balance.shape\[2\] must be 64"):
            library.tiered_attention(query, *state, far="tile4", balance=balance[..., :32])


@pytest.mark.parametrize(
    ("op", "name"), (("quantize_far", "value"), ("tiered_attention", "promoted"))
)
def test_tensors_on_two_devices(op: str, name: str) -> None:
    arguments = valid(op)
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"device.*{name} on meta"):
        getattr(reference, op)(**arguments)
    with pytest.raises((ValueError, RuntimeError)):
        getattr(torch.ops.kvq, op)(**arguments)
