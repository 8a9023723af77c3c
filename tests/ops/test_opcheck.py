"""PyTorch's own checks of every operator: schema, autograd, fake kernels, dynamic tracing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests import cases, tiers
from tests.cases import CASES, Case, State
from torch_kvq import formats

IDS = ("dim96", "bits3-3-dim64", "bits16-16-dim64", "padded0", "mask-additive_inf", "window16",
       "sinks", "softcap5", "length0")  # fmt: skip
SAMPLES = [case for case in CASES if case.id in IDS]


def check(name: str, *args: Any, **kwargs: Any) -> None:
    torch.library.opcheck(getattr(torch.ops.kvq, name).default, args, kwargs)


def clean_state(case: Case) -> State:
    """State without NaN, which the checks would take for a difference, and one spare page."""
    state = cases.make_state(case)
    pages = torch.arange(state.block_table.numel(), dtype=torch.int32).view_as(state.block_table)
    unused = state.block_table < 0
    return State(
        state.tiles,
        torch.where(unused, pages, state.block_table),
        state.balance.nan_to_num(1.0),
        state.exact_key.nan_to_num(0.0),
        state.exact_value.nan_to_num(0.0),
        state.lengths,
    )


def test_samples_exist() -> None:
    assert len(SAMPLES) == len(IDS)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("inverse", (False, True))
def test_fwht(dtype: torch.dtype, inverse: bool) -> None:
    check("fwht", torch.randn(2, 3, 96).to(dtype), formats.signs("key", 96), inverse)
    check("fwht", torch.randn(64, 5).to(dtype).T, None, inverse)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_key_balance(dtype: torch.dtype) -> None:
    check("key_balance", torch.randn(2, 3, 70, 64).to(dtype))


@pytest.mark.parametrize("bits", cases.BITS, ids=str)
def test_tiles(bits: cases.Bits) -> None:
    key, value = torch.randn(2, 3, 64, 64), torch.randn(2, 3, 64, 96)
    balance = torch.ops.kvq.key_balance(key)
    check("quantize_tile", key, value, balance, *bits)
    record = torch.ops.kvq.quantize_tile(key, value, balance, *bits)
    check("dequantize_tile", record, balance, *bits, 96)
    if bits[0] != 16:
        check("dequantize_tile", record, balance, *bits, 96, torch.bfloat16)


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_append(case: Case) -> None:
    longer = replace(case, steps=(*case.steps, 70))
    key, value = cases.make_tokens(longer)
    state = cases.empty_state(longer)
    cases.append_steps(case, state, torch.ops.kvq.quantize_tile_, key, value)
    state = State(*(x.nan_to_num(0.0) if x.is_floating_point() else x for x in state))
    new = (x[:, :, -70:].contiguous() for x in (key, value))
    check("quantize_tile_", *state, *new, *case.bits, **case.rule())


@pytest.mark.parametrize("case", SAMPLES, ids=str)
def test_attention(case: Case) -> None:
    arguments = cases.attention_arguments(case)
    check("lut_attention", cases.make_query(case), *clean_state(case), **arguments)


@pytest.mark.parametrize("dims", ((64, 64), (96, 48)), ids=str)
def test_far(dims: tuple[int, int]) -> None:
    key, value = torch.randn(2, 3, 64, dims[0]), torch.randn(2, 3, 64, dims[1])
    check("quantize_far", key, value)
    check("dequantize_far", torch.ops.kvq.quantize_far(key, value), *dims)
    check("dequantize_far", torch.ops.kvq.quantize_far(key, value), *dims, torch.bfloat16)


@pytest.mark.parametrize("far", tiers.FORMATS)
@pytest.mark.parametrize("case", tiers.by_id(*IDS), ids=str)
def test_tiered_attention(case: Case, far: str) -> None:
    state, query, arguments, _ = tiers.expected(case, far)
    pages = torch.arange(state.block_table.numel(), dtype=torch.int32).view_as(state.block_table)
    clean = state._replace(
        near_key=state.near_key.nan_to_num(0.0),
        near_value=state.near_value.nan_to_num(0.0),
        block_table=torch.where(state.block_table < 0, pages, state.block_table),
    )
    if arguments["balance"] is not None:
        arguments = {**arguments, "balance": arguments["balance"].nan_to_num(1.0)}
    check("tiered_attention", query, *clean, **arguments)
    check("tiered_attention", query, *clean, **arguments, candidates=0)
