"""Bad input: an error that names the argument and the value, and a state that stays as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests import cases
from tests.cases import Case
from tests.ops.compare import assert_same
from torch_kvq import reference

CASE = Case("errors", (4, 3), 64, 96, starts=(0, 5), steps=(300, 40), queries=2)
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Bad:
    """One change to valid arguments; ``words`` must all be in the message.

    With ``reads_data`` it shows in the data, or in a size that may be symbolic, so that tracing
    cannot see it.
    """

    op: str
    words: tuple[str, ...]
    change: Callable[[Arguments], Any]
    error: type[Exception] = ValueError
    reads_data: bool = False

    def __str__(self) -> str:
        return f"{self.op}-{'-'.join(self.words)}"


def assert_rejected(bad: Bad, arguments: Arguments, library: Any) -> None:
    """The change is an error that says what is wrong, and nothing is written."""
    bad.change(arguments)
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    with pytest.raises(bad.error) as caught:
        getattr(library, bad.op)(**arguments)
    for word in bad.words:
        assert word in str(caught.value)
    for name, copy in before.items():
        assert_same(arguments[name], copy)


def assert_rejected_in_tracing(bad: Bad, arguments: Arguments) -> None:
    """The same error without data."""
    bad.change(arguments)
    with FakeTensorMode() as mode:
        fake = {
            name: mode.from_tensor(value) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        with pytest.raises(bad.error) as caught:
            getattr(torch.ops.kvq, bad.op)(**fake)
    for word in bad.words:
        assert word in str(caught.value)


def valid(op: str) -> Arguments:
    """Arguments that an operator accepts, to be changed at will."""
    arguments = _valid(op)
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}


@functools.cache
def _valid(op: str) -> Arguments:
    state = cases.make_state(CASE)
    state = cases.State(state.tiles, state.block_table.clamp(min=0), *state[2:])
    key, value = (x[:, :, :7] for x in cases.make_tokens(CASE))
    bits = {"key_bits": 4, "value_bits": 3}
    tile_key, tile_value = torch.randn(2, 3, 64, 64), torch.randn(2, 3, 64, 96)
    balance = torch.ones(2, 3, 64)
    if op == "fwht":
        return {"x": torch.randn(3, 64), "signs": torch.ones(64)}
    if op == "key_balance":
        return {"key": tile_key}
    if op == "quantize_tile":
        return {"key": tile_key, "value": tile_value, "balance": balance, **bits}
    if op == "dequantize_tile":
        tiles = reference.quantize_tile(tile_key, tile_value, balance, 4, 3)
        return {"tiles": tiles, "balance": balance, "value_dim": 96, **bits}
    if op == "quantize_tile_":
        return {**state._asdict(), "key": key, "value": value, **bits}
    mask = torch.ones(2, 4, 2, 340, dtype=torch.bool)
    query, sinks = cases.make_query(CASE), torch.zeros(4)
    return {**state._asdict(), "query": query, "attn_mask": mask, "sinks": sinks, **bits}


def use(**values: Any) -> Callable[[Arguments], Any]:
    """Replace arguments."""
    return lambda arguments: arguments.update(values)


def apply(name: str, function: Callable[[Tensor], Tensor]) -> Callable[[Arguments], Any]:
    """Replace one tensor by a function of it."""
    return lambda arguments: arguments.update({name: function(arguments[name])})


def write(name: str, index: tuple[int, ...], value: int) -> Callable[[Arguments], Any]:
    """Write one element."""
    return lambda arguments: arguments[name].__setitem__(index, value)


def both(*changes: Callable[[Arguments], Any]) -> Callable[[Arguments], Any]:
    """Make several changes."""
    return lambda arguments: [change(arguments) for change in changes]


def sized(name: str, dim: int, size: int) -> Callable[[Arguments], Any]:
    """Give a dimension of a tensor another size."""

    def change(arguments: Arguments) -> None:
        shape = list(arguments[name].shape)
        shape[dim] = size
        arguments[name] = torch.zeros(shape, dtype=arguments[name].dtype)

    return change


def _tile_inputs() -> list[Bad]:
    double, half = Tensor.double, Tensor.half
    return [
        Bad("fwht", ("x", "float64"), apply("x", double)),
        Bad("fwht", ("x", "int64"), apply("x", Tensor.long)),
        Bad("fwht", ("x.shape[-1]", "40"), sized("x", 1, 40)),
        Bad("fwht", ("x.shape[-1]", "16"), sized("x", 1, 16)),
        Bad("fwht", ("x.shape[-1]", "528"), sized("x", 1, 528)),
        Bad("fwht", ("x",), use(x=torch.tensor(1.0), signs=None)),
        Bad("fwht", ("signs", "48"), sized("signs", 0, 48)),
        Bad("fwht", ("signs", "(1, 64)"), apply("signs", lambda x: x[None])),
        Bad("fwht", ("signs", "float16"), apply("signs", half)),
        Bad("key_balance", ("key", "(3, 64, 64)"), apply("key", lambda x: x[0])),
        Bad("key_balance", ("key", "(2, 3, 0, 64)"), sized("key", 2, 0), reads_data=True),
        Bad("key_balance", ("key", "float64"), apply("key", double)),
        Bad("key_balance", ("key.shape[-1]", "72"), sized("key", 3, 72)),
        Bad("quantize_tile", ("key", "(3, 64, 64)"), apply("key", lambda x: x[0])),
        Bad("quantize_tile", ("key", "float64"), apply("key", double)),
        Bad("quantize_tile", ("value", "float16"), apply("value", half)),
        Bad("quantize_tile", ("value.shape[2]", "63"), sized("value", 2, 63)),
        Bad("quantize_tile", ("value.shape[1]", "2"), sized("value", 1, 2)),
        Bad("quantize_tile", ("value.shape[0]", "3"), sized("value", 0, 3)),
        Bad("quantize_tile", ("key.shape[-1]", "24"), sized("key", 3, 24)),
        Bad("quantize_tile", ("value.shape[-1]", "1024"), sized("value", 3, 1024)),
        Bad("quantize_tile", ("balance", "(3, 64)"), apply("balance", lambda x: x[0])),
        Bad("quantize_tile", ("balance", "float64"), apply("balance", double)),
        Bad("quantize_tile", ("balance.shape[0]", "3"), sized("balance", 0, 3)),
        Bad("quantize_tile", ("balance.shape[1]", "1"), sized("balance", 1, 1)),
        Bad("quantize_tile", ("balance.shape[2]", "96"), sized("balance", 2, 96)),
        Bad("quantize_tile", ("key_bits=5",), use(key_bits=5)),
        Bad("quantize_tile", ("value_bits=16",), use(value_bits=16)),
        Bad("quantize_tile", ("key_bits=-4",), use(key_bits=-4)),
        Bad("quantize_tile", ("key_bits=8", "value_bits=8"), use(key_bits=8, value_bits=8)),
        Bad("dequantize_tile", ("tiles", "int8"), apply("tiles", Tensor.char)),
        Bad("dequantize_tile", ("tiles", "(3, "), apply("tiles", lambda x: x[0])),
        Bad("dequantize_tile", ("tiles.shape[2]", "4000"), sized("tiles", 2, 4000)),
        Bad("dequantize_tile", ("balance.shape[0]", "7"), sized("balance", 0, 7)),
        Bad("dequantize_tile", ("balance.shape[1]", "4"), sized("balance", 1, 4)),
        Bad("dequantize_tile", ("tiles.shape[2]", "record"), sized("balance", 2, 128)),
        Bad("dequantize_tile", ("value_dim", "90"), use(value_dim=90)),
        Bad("dequantize_tile", ("tiles.shape[2]",), use(value_dim=128)),
        Bad("dequantize_tile", ("tiles.shape[2]",), use(key_bits=2)),
        Bad("dequantize_tile", ("value_bits=0",), use(value_bits=0)),
        Bad("dequantize_tile", ("dtype", "float64"), use(dtype=torch.float64)),
    ]


def _states(op: str) -> list[Bad]:
    """Changes that break the state of a layer for whoever reads it."""
    length = "lengths[1]"
    return [
        Bad(op, ("exact_key", "(2, 2"), apply("exact_key", lambda x: x[..., 0])),
        Bad(op, ("exact_key", "float64"), apply("exact_key", Tensor.double)),
        Bad(op, ("exact_value", "bfloat16"), apply("exact_value", Tensor.bfloat16)),
        Bad(op, ("exact_value.shape[0]", "1"), sized("exact_value", 0, 1)),
        Bad(op, ("exact_value.shape[1]", "3"), sized("exact_value", 1, 3)),
        Bad(op, ("exact_value.shape[2]", "500"), sized("exact_value", 2, 500)),
        Bad(op, ("value", "100"), sized("exact_value", 3, 100)),
        Bad(op, ("tiles", "int8"), apply("tiles", Tensor.char)),
        Bad(op, ("tiles", "dimensions"), apply("tiles", lambda x: x[0])),
        Bad(op, ("tiles.shape[1]", "1"), sized("tiles", 1, 1)),
        Bad(op, ("tiles.shape[2]", "128"), sized("tiles", 2, 128)),
        Bad(op, ("block_table", "int64"), apply("block_table", Tensor.long)),
        Bad(op, ("block_table.shape[0]", "3"), sized("block_table", 0, 3)),
        Bad(op, ("block_table", "dimensions"), apply("block_table", lambda x: x[0])),
        Bad(op, ("lengths", "int64"), apply("lengths", Tensor.long)),
        Bad(op, ("lengths.shape[0]", "1"), sized("lengths", 0, 1)),
        Bad(op, ("lengths.shape[1]", "2"), sized("lengths", 1, 2)),
        Bad(op, ("balance", "float16"), apply("balance", Tensor.half)),
        Bad(op, ("balance.shape[0]", "1"), sized("balance", 0, 1)),
        Bad(op, ("balance.shape[1]", "4"), sized("balance", 1, 4)),
        Bad(op, ("balance.shape[2]", "32"), sized("balance", 2, 32)),
        Bad(op, ("key_bits=6",), use(key_bits=6)),
        Bad(op, ("sink_tokens", "-1"), use(sink_tokens=-1)),
        Bad(op, (length, "-1"), write("lengths", (1, 0), -1), IndexError, True),
        Bad(op, (length, "-7"), write("lengths", (1, 1), -7), IndexError, True),
        Bad(op, (length, "-64"), write("lengths", (1, 2), -64), IndexError, True),
        Bad(op, (length, "400"), write("lengths", (1, 2), 400), IndexError, True),
        Bad(op, (length, "6000"), write("lengths", (1, 1), 6000), IndexError, True),
        Bad(op, (length, "2147483647"), write("lengths", (1, 1), 2**31 - 1), IndexError, True),
        Bad(op, ("lengths[0]", "3 pages"), sized("block_table", 1, 3), IndexError, True),
    ]


def _appends() -> list[Bad]:
    op = "quantize_tile_"
    written = ("tiles", "balance", "exact_key", "exact_value", "lengths")
    return [
        *_states(op),
        *(
            Bad(op, (name, "contiguous"), apply(name, lambda x: x.mT.contiguous().mT))
            for name in written
        ),
        Bad(op, ("key", "float16"), both(apply("key", Tensor.half), apply("value", Tensor.half))),
        Bad(op, ("value", "float16"), apply("value", Tensor.half)),
        Bad(op, ("key", "dimensions"), apply("key", lambda x: x[0])),
        Bad(op, ("value.shape[2]", "8"), sized("value", 2, 8)),
        Bad(op, ("key.shape[3]", "128"), sized("key", 3, 128)),
        Bad(op, ("value.shape[3]", "64"), sized("value", 3, 64)),
        Bad(op, ("key.shape[0]", "3"), both(sized("key", 0, 3), sized("value", 0, 3))),
        Bad(op, ("key.shape[1]", "1"), both(sized("key", 1, 1), sized("value", 1, 1))),
        Bad(op, ("residual_length", "-1"), use(residual_length=-1)),
        Bad(op, ("quantized_start", "-5"), use(quantized_start=-5)),
        Bad(op, ("exact_key", "row 0", "291"), _more(207), IndexError, True),
        Bad(op, ("block_table", "row 0", "6"), _more(64 * 2 + 7, capacity=900), IndexError, True),
        Bad(op, ("block_table[1, 4]", "-1"), _next_page(-1), IndexError, True),
        Bad(op, ("block_table[1, 4]", "11"), _next_page(11), IndexError, True),
    ]


def _more(tokens: int, capacity: int | None = None) -> Callable[[Arguments], None]:
    """Append so many tokens, that stay exact when no other capacity is given."""

    def change(arguments: Arguments) -> None:
        sized("key", 2, tokens)(arguments)
        sized("value", 2, tokens)(arguments)
        if capacity is None:
            arguments["residual_length"] = 10**6
        else:
            sized("exact_key", 2, capacity)(arguments)
            sized("exact_value", 2, capacity)(arguments)

    return change


def _next_page(page: int) -> Callable[[Arguments], None]:
    """Complete a fifth tile, whose page in the second row does not exist."""

    def change(arguments: Arguments) -> None:
        _more(64)(arguments)
        arguments["residual_length"] = 64
        arguments["block_table"][1, 4] = page

    return change


def _attentions() -> list[Bad]:
    op, nan = "lut_attention", float("nan")
    return [
        *_states(op),
        Bad(op, ("query", "dimensions"), apply("query", lambda x: x[0])),
        Bad(op, ("query", "float64"), apply("query", Tensor.double)),
        Bad(op, ("query.shape[0]", "1"), sized("query", 0, 1)),
        Bad(op, ("query.shape[3]", "128"), sized("query", 3, 128)),
        Bad(op, ("query heads", "3"), sized("query", 1, 3)),
        Bad(op, ("attn_mask", "int64"), apply("attn_mask", Tensor.long)),
        Bad(op, ("attn_mask", "dimensions"), apply("attn_mask", lambda x: x[0])),
        Bad(op, ("attn_mask.shape[0]", "3"), sized("attn_mask", 0, 3)),
        Bad(op, ("attn_mask.shape[1]", "2"), sized("attn_mask", 1, 2)),
        Bad(op, ("attn_mask.shape[2]", "5"), sized("attn_mask", 2, 5)),
        Bad(op, ("attn_mask.shape[3]", "340", "339"), sized("attn_mask", 3, 339), reads_data=True),
        Bad(op, ("attn_mask.shape[3]", "340"), sized("attn_mask", 3, 1), reads_data=True),
        Bad(op, ("sinks", "dimensions"), apply("sinks", lambda x: x[None])),
        Bad(op, ("sinks", "float64"), apply("sinks", Tensor.double)),
        Bad(op, ("sinks.shape[0]", "2"), sized("sinks", 0, 2)),
        Bad(op, ("sliding_window", "0"), use(sliding_window=0)),
        Bad(op, ("sliding_window", "-1"), use(sliding_window=-1)),
        Bad(op, ("softcap", "0"), use(softcap=0.0)),
        Bad(op, ("softcap", "nan"), use(softcap=nan)),
        Bad(op, ("precision", "'exakt'"), use(precision="exakt")),
        Bad(op, ("block_table[1, 3]", "-1"), write("block_table", (1, 3), -1), IndexError, True),
        Bad(op, ("block_table[0, 0]", "11"), write("block_table", (0, 0), 11), IndexError, True),
    ]


TABLE = [*_tile_inputs(), *_appends(), *_attentions()]


@pytest.mark.parametrize("op", sorted({bad.op for bad in TABLE}))
def test_the_unchanged_arguments_are_valid(op: str) -> None:
    getattr(reference, op)(**valid(op))
    getattr(torch.ops.kvq, op)(**valid(op))


@pytest.mark.parametrize("library", (reference, torch.ops.kvq), ids=("reference", "operator"))
@pytest.mark.parametrize("bad", TABLE, ids=str)
def test_bad_input_is_an_error_before_any_write(bad: Bad, library: Any) -> None:
    assert_rejected(bad, valid(bad.op), library)


@pytest.mark.parametrize("bad", [bad for bad in TABLE if not bad.reads_data], ids=str)
def test_tracing_sees_the_same_error(bad: Bad) -> None:
    assert_rejected_in_tracing(bad, valid(bad.op))


MIXED = {
    "fwht": "signs",
    "quantize_tile": "balance",
    "quantize_tile_": "key",
    "lut_attention": "query",
}


@pytest.mark.parametrize("op", MIXED)
def test_tensors_on_two_devices(op: str) -> None:
    name, arguments = MIXED[op], valid(op)
    arguments[name] = arguments[name].to("meta")
    with pytest.raises(ValueError, match=f"device.*{name} on meta"):
        getattr(reference, op)(**arguments)
    with pytest.raises((ValueError, RuntimeError)):
        getattr(torch.ops.kvq, op)(**arguments)
