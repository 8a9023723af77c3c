"""Appending tokens to a layer in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_kvq
from tests import cases
from tests.cases import CASES, Case, State
from tests.ops.compare import assert_same, assert_state_equal, live_exact
from torch_kvq import formats, reference
from torch_kvq.reference import encode


def row_of(state: State, row: int) -> tuple[list[Tensor], list[Tensor]]:
    """Records of a row in order, and its exact tokens."""
    used = int(state.lengths[row, formats.QUANTIZED])
    pages = state.block_table[row, : -(-used // 64)].long()
    return [state.tiles[pages]], live_exact(state)[2 * row : 2 * row + 2]


def assert_rows_equal(state: State, row: int, other: State, other_row: int) -> None:
    for parts, wanted in zip(row_of(state, row), row_of(other, other_row), strict=True):
        for part, want in zip(parts, wanted, strict=True):
            assert_same(part, want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_writes_the_same_state(tier: str, case: Case) -> None:
    state = cases.make_state(case, torch_kvq.quantize_tile_)
    assert_state_equal(state, cases.expected(case).state)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_is_where_the_format_says(case: Case) -> None:
    """In the pass-through codec the state holds each token itself."""
    case = replace(case, bits=(16, 16))
    state, (key, value) = cases.make_state(case, torch_kvq.quantize_tile_), cases.make_tokens(case)
    order = attended_tokens(case)
    records = torch_kvq.dequantize_tile(
        state.tiles, state.balance[:1], 16, 16, case.value_dim, case.dtype
    )
    for row, (start, length, used) in enumerate(state.lengths.tolist()):
        assert length == case.length
        pages = state.block_table[row, : -(-used // 64)].long()
        buffers = (state.exact_key, state.exact_value)
        for raw, tiles, exact in zip((key, value), records, buffers, strict=True):
            wanted = raw[row][:, order[start:]]
            stored = tiles[pages].transpose(0, 1).flatten(1, 2)[:, :used]
            s, held = case.sink_tokens, wanted.shape[1] - used
            assert_same(stored, wanted[:, s : s + used])
            assert_same(exact[row, :, : min(s, held)], wanted[:, : min(s, held)])
            assert_same(exact[row, :, s:held], wanted[:, s + used :])


def attended_tokens(case: Case) -> list[int]:
    """Which of the appended tokens stands at each position after all steps."""
    order: list[int] = []
    used = 0
    for step in case.steps:
        order = order[:step] if step < 0 else order + list(range(used, used + step))
        used += max(step, 0)
    return order


@pytest.mark.parametrize("rule", ((4, 64, 256), (4, 64, 0), (0, 0, 0), (7, 16, 150)), ids=str)
@pytest.mark.parametrize("bits", cases.BITS, ids=str)
def test_chunks_do_not_change_the_state(
    capability: str, bits: cases.Bits, rule: tuple[int, int, int]
) -> None:
    names = ("sink_tokens", "residual_length", "quantized_start")
    options: dict[str, Any] = dict(zip(names, rule, strict=True))
    once = Case("chunks", bits, steps=(500,), starts=(0, 30), **options)
    pieces = replace(once, steps=(3, 200, *(1,) * 70, 7, 63, 157))
    state = cases.make_state(pieces, torch_kvq.quantize_tile_)
    assert_state_equal(state, cases.make_state(once, torch_kvq.quantize_tile_))


@pytest.mark.parametrize("case", [c for c in CASES if c.batch > 1 and not c.shared_pages], ids=str)
def test_a_row_holds_what_it_would_hold_alone(case: Case) -> None:
    state, (key, value) = cases.make_state(case, torch_kvq.quantize_tile_), cases.make_tokens(case)
    for row, start in enumerate(case.starts):
        alone = replace(case, starts=(start,))
        single = cases.empty_state(alone)
        cases.append_steps(
            alone, single, torch_kvq.quantize_tile_, key[row : row + 1], value[row : row + 1]
        )
        assert_rows_equal(state, row, single, 0)


@pytest.mark.parametrize("bits", cases.BITS, ids=str)
@pytest.mark.parametrize("keep", (4 + 64 + 1, 4 + 64 + 63, 4 + 100, 4 + 128))
def test_refilling_a_cut_restores_the_records(capability: str, bits: cases.Bits, keep: int) -> None:
    case = Case("refill", bits, 64, 96, steps=(500,))
    state, tokens = cases.empty_state(case), cases.make_tokens(case)
    cases.append_steps(case, state, torch_kvq.quantize_tile_, *tokens)
    before = state.tiles.clone()
    cases.cut(state, 500 - keep, case.sink_tokens)
    pages = state.block_table[0, state.lengths[0, 2] // 64 + 1 :].long()
    state.tiles[pages] = 0xFF
    for first, end in ((keep, 150), (150, 151), (151, 420), (420, 500)):
        key, value = (x[:, :, first:end] for x in tokens)
        torch_kvq.quantize_tile_(*state, key, value, *bits)
    assert state.lengths.tolist() == [[0, 500, 384]]
    assert_same(
        state.tiles[state.block_table[0, :6].long()], before[state.block_table[0, :6].long()]
    )


@pytest.mark.parametrize("bits", ((4, 4), (3, 3), (2, 2), (4, 3)), ids=str)
def test_other_tokens_complete_a_tile_under_its_mean(capability: str, bits: cases.Bits) -> None:
    case = Case("complete", bits, steps=(400, -296, 200))
    state, (key, value) = cases.empty_state(case), cases.make_tokens(case)
    torch_kvq.quantize_tile_(*state, key[:, :, :400], value[:, :, :400], *bits)
    page, slot = int(state.block_table[0, 1]), 100 - 64
    before, balance = state.tiles[page].clone(), state.balance[0].clone()
    cases.cut(state, 400 - 104, case.sink_tokens)
    new = (key[:, :, 400:] * 1.5, value[:, :, 400:])
    torch_kvq.quantize_tile_(*state, *new, *bits)
    old, now = (reference.decode.read_record(x, case.layout) for x in (before, state.tiles[page]))
    assert_same(state.balance[0], balance)
    assert_same(now.mean, old.mean)
    assert_same(now.mean_scale, old.mean_scale)
    fill = 64 - slot
    keys = encode.encode_keys(new[0][0, :, :fill], balance, old.mean, old.mean_scale, bits[0])
    values = encode.encode_values(new[1][0, :, :fill], bits[1])
    written = ((now.key_scale, now.key_codes), (now.value_scale, now.value_codes))
    kept = ((old.key_scale, old.key_codes), (old.value_scale, old.value_codes))
    for parts, earlier, wanted in zip(written, kept, (keys, values), strict=True):
        for part, first, last in zip(parts, earlier, wanted, strict=True):
            assert_same(part[:, :slot], first[:, :slot])
            assert_same(part[:, slot:], last)


def test_the_balance_is_written_once_and_again_after_all_tiles_are_gone(capability: str) -> None:
    case = Case("balance", steps=(300, 100))
    state, (key, value) = cases.empty_state(case), cases.make_tokens(case)
    torch_kvq.quantize_tile_(*state, key[:, :, :300], value[:, :, :300])
    first = state.balance.clone()
    assert_same(first, reference.key_balance(key[:, :, 4:300]))
    torch_kvq.quantize_tile_(*state, key[:, :, 300:] * 9, value[:, :, 300:])
    assert_same(state.balance, first)
    cases.cut(state, 398, case.sink_tokens)
    torch_kvq.quantize_tile_(*state, key[:, :, :298] * 9, value[:, :, :298])
    assert not torch.equal(state.balance, first)


def test_strides(capability: str) -> None:
    case = Case("strides", (4, 3), 64, 96, dtype=torch.float16, starts=(0, 9), steps=(290, 70))
    wanted = cases.expected(case).state
    key, value = cases.make_tokens(case)
    key = key.transpose(1, 2).contiguous().transpose(1, 2)
    value = torch.nn.functional.pad(value, (3, 5))[..., 3:-5]
    state = cases.empty_state(case)
    cases.append_steps(case, state, torch_kvq.quantize_tile_, key, value)
    cases.poison_unused(state)
    assert_state_equal(state, wanted)


def test_state_in_larger_buffers(capability: str) -> None:
    """A pool of pages and a batch of buffers may be handed over as slices."""
    case = Case("slices", (3, 3), starts=(0, 9), steps=(290, 70))
    state = cases.empty_state(case)
    outer = [torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (1, 1), value=77) for x in state]
    outer[1] = torch.nn.functional.pad(state.block_table, (3, 2), value=-9)
    views = State(outer[0][1:-1], outer[1][:, 3:-2], *(x[1:-1] for x in outer[2:]))
    cases.append_steps(case, views, torch_kvq.quantize_tile_, *cases.make_tokens(case))
    for x in (outer[0], *outer[2:]):
        assert_same(x[:: len(x) - 1], torch.full_like(x[:2], 77))
    cases.poison_unused(views)
    assert_state_equal(views, cases.expected(case).state)


def test_new_tokens_may_be_expanded(capability: str) -> None:
    case = Case("expanded", starts=(0, 0, 0), steps=(300,))
    one = torch.randn(1, 1, 300, 64, generator=case.generator("one"))
    states = []
    for tokens in (one.expand(3, 2, -1, -1), one.expand(3, 2, -1, -1).contiguous()):
        state = cases.empty_state(case)
        torch_kvq.quantize_tile_(*state, tokens, tokens)
        states.append(state)
    assert_state_equal(states[0], states[1])


@pytest.mark.parametrize("bits", ((4, 4), (16, 16)), ids=str)
def test_nothing_to_append(capability: str, bits: cases.Bits) -> None:
    case = Case("nothing", bits, steps=(300, 0, 0))
    state = cases.make_state(case, torch_kvq.quantize_tile_)
    assert_state_equal(state, cases.make_state(replace(case, steps=(300,))))
    empty = cases.empty_state(replace(case, starts=()))
    none = torch.empty(0, 2, 5, 64)
    torch_kvq.quantize_tile_(*empty, none, none, *bits)
