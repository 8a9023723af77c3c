"""What must not matter: strides, threads, instruction sets and memory that nobody may read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_kvq
from tests import cases
from tests.cases import CASES, Case, State
from tests.conftest import TIERS
from tests.ops.compare import assert_same, assert_state_equal
from torch_kvq import formats, reference

Attention = Callable[..., tuple[Tensor, Tensor]]
STRIDED = ("dims64-128", "group8", "mask-bool_heads", "mask-additive_inf", "padded1", "everything",
           "bits16-16-dim64")  # fmt: skip
THREADED = (
    "dim64",
    "long",
    "long-padded",
    "queries64",
    "padded2-causal",
    "group16",
    "bits2-2-dim128",
)


def by_id(*ids: str) -> list[Case]:
    return [case for case in CASES if case.id in ids]


@pytest.fixture(params=("reference", *TIERS))
def attention(request: pytest.FixtureRequest) -> Iterator[Attention]:
    """Attention by the reference, then by the kernels of each instruction set."""
    if request.param == "reference":
        yield reference.lut_attention
        return
    with torch_kvq.cpu_capability(request.param):
        yield torch_kvq.lut_attention


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set the number of threads until the end of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def spread(x: Tensor) -> Tensor:
    """Same values, no dimension contiguous with the next, at an odd offset."""
    wide = torch.full([2 * n + 3 for n in x.shape], 1, dtype=x.dtype)
    view = wide[tuple(slice(1, 2 * n + 1, 2) for n in x.shape)]
    view.copy_(x)
    return view


def swapped(x: Tensor) -> Tensor:
    """Same values with the first two dimensions swapped in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def row_sliced(x: Tensor) -> Tensor:
    """Same values as a slice of longer rows."""
    return torch.nn.functional.pad(x, (3, 2))[..., 3:-2]


def test_views_are_what_they_claim() -> None:
    x = torch.randn(2, 3, 4, 5)
    for view in (spread(x), swapped(x), row_sliced(x)):
        assert torch.equal(view, x) and not view.is_contiguous()


@pytest.mark.parametrize("view", (spread, swapped, row_sliced))
@pytest.mark.parametrize("case", by_id(*STRIDED), ids=str)
def test_strides(attention: Attention, case: Case, view: Callable[[Tensor], Tensor]) -> None:
    expected = cases.expected(case)
    wanted = attention(expected.query, *expected.state, **expected.arguments)
    state = State(*(view(x) for x in expected.state))
    arguments = dict(expected.arguments)
    if arguments["attn_mask"] is not None:
        arguments["attn_mask"] = view(arguments["attn_mask"])
    if arguments["sinks"] is not None:
        arguments["sinks"] = spread(arguments["sinks"])
    # The reference multiplies matrices, whose sums may depend on the memory layout.
    tolerance = 1e-5 if attention is reference.lut_attention else 0
    for out, same in zip(attention(view(expected.query), *state, **arguments), wanted, strict=True):
        torch.testing.assert_close(out, same, rtol=tolerance, atol=tolerance)


def test_expanded_inputs(attention: Attention) -> None:
    case = Case("expanded", starts=(0, 0, 0), steps=(300,), queries=2)
    state = cases.make_state(Case("expanded", steps=(300,)))
    state = State(state.tiles, *(x.expand(3, *x.shape[1:]) for x in state[1:]))
    query = cases.make_query(case)[:1, :1].expand(3, 4, 2, 64)
    mask = (torch.arange(300) % 3 > 0).expand(3, 4, 2, 300)
    wanted = attention(query.contiguous(), *state.clone(), mask.contiguous())
    for out, same in zip(attention(query, *state, mask), wanted, strict=True):
        assert_same(out, same)
        assert_same(out[1:], out[:1].expand_as(out[1:]))


def test_masks_broadcast(attention: Attention) -> None:
    case = Case("broadcast", starts=(0, 5), queries=3)
    expected = cases.expected(case)
    for shape in ((1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 3), (2, 4, 1), (2, 1, 3), (1, 4, 3)):
        for mask in (torch.rand(*shape, 330) < 0.5, torch.randn(*shape, 330)):
            full = mask.expand(2, 4, 3, -1).contiguous()
            wanted = attention(expected.query, *expected.state, full)
            for out, same in zip(
                attention(expected.query, *expected.state, mask), wanted, strict=True
            ):
                assert_same(out, same)


@pytest.mark.skipif(len(TIERS) < 2, reason="this machine has kernels of one instruction set only")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_instruction_sets_agree_to_the_last_bit(case: Case) -> None:
    expected, results = cases.expected(case), []
    for name in TIERS:
        with torch_kvq.cpu_capability(name):
            results.append(
                torch_kvq.lut_attention(expected.query, *expected.state, **expected.arguments)
            )
    for out, lse in results[1:]:
        assert_same(out, results[0][0])
        assert_same(lse, results[0][1])


@pytest.mark.parametrize("case", by_id(*THREADED), ids=str)
def test_threads_do_not_change_a_bit(tier: str, case: Case, threads: Callable[[int], None]) -> None:
    expected, results = cases.expected(case), []
    for count in (1, 2, 3):
        threads(count)
        state = cases.make_state(case, torch_kvq.quantize_tile_)
        assert_state_equal(state, expected.state)
        results.append(
            [
                torch_kvq.lut_attention(
                    expected.query, *expected.state, **expected.arguments, precision=precision
                )
                for precision in ("exact", "fast")
            ]
        )
    for result in results[1:]:
        for parts, wanted in zip(result, results[0], strict=True):
            assert_same(parts[0], wanted[0])
            assert_same(parts[1], wanted[1])


def hiding(case: Case, hidden: Tensor) -> dict[str, dict[str, Any]]:
    """Ways to hide positions from every query, ``hidden`` being bool ``[positions]``."""
    keep = ~hidden.expand(1, 1, 1, -1)
    zeros = torch.zeros(1, 1, 1, case.length)
    return {
        "bool": {"attn_mask": keep},
        "infinite": {"attn_mask": zeros.masked_fill(hidden, -torch.inf)},
        "lowest": {"attn_mask": zeros.masked_fill(hidden, torch.finfo(torch.float32).min)},
        "half": {"attn_mask": zeros.half().masked_fill(hidden, -65504)},
    }


@pytest.mark.parametrize("kind", ("bool", "infinite", "lowest", "half"))
@pytest.mark.parametrize("poison", (torch.nan, torch.inf))
def test_masked_tokens_do_not_leak(attention: Attention, kind: str, poison: float) -> None:
    case = Case("masked-nan", steps=(333,), queries=3, starts=(0, 2))
    state, query = cases.make_state(case), cases.make_query(case)
    hidden = torch.zeros(333, dtype=torch.bool)
    hidden[[0, 1, 2, 3, 300, 310, 311, 332]] = True
    arguments = hiding(case, hidden)[kind]
    wanted = attention(query, *state, **arguments)
    dirty = state.clone()
    for buffer in (dirty.exact_key, dirty.exact_value):
        for row, (start, _, used) in enumerate(dirty.lengths.tolist()):
            for position in hidden.nonzero().flatten().tolist():
                token = position - start
                if 0 <= token < 4 or token >= 4 + used:
                    buffer[row, :, token if token < 4 else token - used] = poison
    assert bool(wanted[0].isfinite().all())
    for out, same in zip(attention(query, *dirty, **arguments), wanted, strict=True):
        assert_same(out, same)


@pytest.mark.parametrize("steps", ((100,), (333,)), ids=str)
def test_later_tokens_do_not_leak_into_causal_queries(
    attention: Attention, steps: tuple[int, ...]
) -> None:
    case = Case("causal-nan", steps=steps, queries=5, is_causal=True)
    state, query = cases.make_state(case), cases.make_query(case)
    wanted = attention(query, *state, is_causal=True)
    held = sum(steps) - int(state.lengths[0, formats.QUANTIZED])
    state.exact_key[:, :, held - 1] = torch.nan
    state.exact_value[:, :, held - 1] = torch.nan
    for out, same in zip(attention(query, *state, is_causal=True), wanted, strict=True):
        assert_same(out[:, :, :4], same[:, :, :4])


def test_tokens_before_the_window_do_not_leak(attention: Attention) -> None:
    case = Case("window-nan", steps=(333,), queries=2)
    state, query = cases.make_state(case), cases.make_query(case)
    wanted = attention(query, *state, is_causal=True, sliding_window=20)
    state.exact_key[:, :, :50] = torch.nan
    state.exact_value[:, :, :50] = torch.nan
    state.tiles.fill_(0xFF)
    state.balance.fill_(torch.nan)
    result = attention(query, *state, is_causal=True, sliding_window=20)
    for out, same in zip(result, wanted, strict=True):
        assert_same(out, same)


@pytest.mark.parametrize("bits", cases.BITS, ids=str)
def test_the_rest_of_a_partial_tile_does_not_leak(attention: Attention, bits: cases.Bits) -> None:
    case = Case("partial-nan", bits, steps=(330, -150), queries=2)
    state, query = cases.make_state(case), cases.make_query(case)
    assert state.lengths.tolist() == [[0, 180, 176]]
    arguments = {"key_bits": bits[0], "value_bits": bits[1]}
    wanted = attention(query, *state, **arguments)
    page, slot, layout = int(state.block_table[0, 2]), 176 - 128, case.layout
    record = state.tiles[page]
    size = 4 * 64 if layout.is_pass_through else 2
    for offset in (layout.key_scale_offset, layout.value_scale_offset):
        if layout.is_pass_through:
            offset = layout.key_code_offset if offset == 0 else layout.value_code_offset
        record[:, offset + size * slot : offset + size * 64] = 0xFF
    for out, same in zip(attention(query, *state, **arguments), wanted, strict=True):
        assert_same(out, same)


def test_a_broken_query_leaves_the_others_alone(attention: Attention) -> None:
    case = Case("broken-query", steps=(333,), queries=3)
    state, query = cases.make_state(case), cases.make_query(case)
    wanted = attention(query, *state)
    query[:, 1, 1] = torch.nan
    query[:, 2, 0] = torch.inf
    same = torch.ones(4, 3, dtype=torch.bool)
    same[1, 1] = same[2, 0] = False
    for out, good in zip(attention(query, *state), wanted, strict=True):
        assert_same(out[0][same], good[0][same])


@pytest.mark.parametrize("bits", (4, 3, 2))
def test_infinities_stay_in_their_tile(attention: Attention, bits: int) -> None:
    case = Case("infinite", (bits, bits), steps=(500,), queries=2)
    query, clean = cases.make_query(case), cases.make_state(case)
    key, value = (x.clone() for x in cases.make_tokens(case))
    for x in (key, value):
        x[:, :, 280, 3], x[:, :, 290, 5], x[:, :, 291, 5] = torch.inf, -torch.inf, torch.nan
    state = cases.empty_state(case)
    reference.quantize_tile_(*state, key, value, bits, bits)
    arguments = {"key_bits": bits, "value_bits": bits}
    for out in attention(query, *state, **arguments):
        assert bool(out.isfinite().all())
    others = torch.ones(1, 1, 1, 500, dtype=torch.bool)
    others[..., 260:324] = False
    for out, same in zip(
        attention(query, *state, others, **arguments),
        attention(query, *clean, others, **arguments),
        strict=True,
    ):
        assert_same(out, same)


def test_inputs_are_not_written(attention: Attention) -> None:
    for case in by_id("everything", "cut0"):
        expected = cases.expected(case)
        before = [x.clone() for x in (expected.query, *expected.state)]
        attention(expected.query, *expected.state, **expected.arguments)
        for x, copy in zip((expected.query, *expected.state), before, strict=True):
            assert_same(x, copy)
