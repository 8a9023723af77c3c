"""Two tiers: strides, threads, instruction sets, tokens and memory that nobody may read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_kvq
from tests import cases, tiers
from tests.cases import Case
from tests.conftest import TIERS
from tests.ops.compare import assert_same
from tests.ops.test_robustness import row_sliced, spread, swapped
from tests.ops.test_robustness import threads as threads
from tests.tiers import TIER_CASES, TieredState, by_id
from torch_kvq import formats

far = pytest.mark.parametrize("far", tiers.FORMATS)
STRIDED = ("dims64-128", "group8", "mask-bool_heads", "mask-additive_inf", "padded1-causal",
           "everything")  # fmt: skip
THREADED = ("dim64", "long", "long-padded", "queries64", "padded2-causal", "group16")


def call(expected: tiers.Expected, **changes: Any) -> tuple[Tensor, ...]:
    """The operator with some arguments of a case changed."""
    arguments = {**expected.state._asdict(), "query": expected.query, **expected.arguments}
    return torch_kvq.tiered_attention(**{**arguments, **changes})


def assert_equal(results: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """All results are the same to the last bit."""
    for result, same in zip(results, wanted, strict=True):
        assert_same(result, same)


@pytest.mark.skipif(len(TIERS) < 2, reason="this machine has kernels of one instruction set only")
@far
@pytest.mark.parametrize("case", TIER_CASES, ids=str)
def test_instruction_sets_agree_to_the_last_bit(case: Case, far: str) -> None:
    expected, results = tiers.expected(case, far), []
    for name in TIERS:
        with torch_kvq.cpu_capability(name):
            results.append(call(expected))
    for result in results[1:]:
        assert_equal(result, results[0])


@far
@pytest.mark.parametrize("case", by_id(*THREADED), ids=str)
def test_threads_do_not_change_a_bit(
    tier: str, case: Case, far: str, threads: Callable[[int], None]
) -> None:
    expected, results = tiers.expected(case, far), []
    for count in (1, 2, 3):
        threads(count)
        results.append(call(expected))
    for result in results[1:]:
        assert_equal(result, results[0])


@far
def test_rounds_do_not_change_a_bit(tier: str, far: str) -> None:
    """A call whose partial results take several rounds is its rows one after the other."""
    case = Case("rounds", starts=(0, 7, 20), steps=(700,), queries=230, heads=8, kv_heads=4,
                is_causal=True)  # fmt: skip
    expected = tiers.expected(case, far)
    whole = call(expected)
    for row in range(case.batch):
        state = {
            name: x if name == "tiles" else x[row : row + 1]
            for name, x in expected.state._asdict().items()
        }
        balance = expected.arguments["balance"]
        one = call(
            expected,
            **state,
            query=expected.query[row : row + 1],
            balance=None if balance is None else balance[row : row + 1],
        )
        # Fewer blocks are cut into more splits, so that sums are rounded elsewhere.
        for got, same in zip(one, whole, strict=True):
            torch.testing.assert_close(got, same[row : row + 1], rtol=1e-4, atol=1e-4)


@far
@pytest.mark.parametrize("view", (spread, swapped, row_sliced))
@pytest.mark.parametrize("case", by_id(*STRIDED), ids=str)
def test_strides(tier: str, case: Case, far: str, view: Callable[[Tensor], Tensor]) -> None:
    expected = tiers.expected(case, far)
    state = {
        name: spread(x) if view is swapped and x.dim() < 2 else view(x)
        for name, x in expected.state._asdict().items()
    }
    changes = {
        name: view(expected.arguments[name])
        for name in ("attn_mask", "balance")
        if expected.arguments[name] is not None
    }
    assert_equal(call(expected, **state, query=view(expected.query), **changes), call(expected))


def poisoned(state: TieredState, tokens: set[int], value: float) -> TieredState:
    """The state with some near tokens of every head overwritten."""
    state = state.clone()
    for row, heads in enumerate(state.near_index.tolist()):
        for head, slots in enumerate(heads):
            for slot, token in enumerate(slots[: int(state.near_count[row, head])]):
                if token in tokens:
                    state.near_key[row, head, slot] = value
                    state.near_value[row, head, slot] = value
    return state


@far
@pytest.mark.parametrize("value", (torch.nan, torch.inf))
@pytest.mark.parametrize("kind", ("bool", "additive"))
def test_masked_near_tokens_do_not_leak(capability: str, far: str, kind: str, value: float) -> None:
    case = Case("masked-near", steps=(400,), queries=3)
    expected = tiers.expected(case, far)
    hidden = torch.rand(400, generator=case.generator("hidden")) < 0.3
    keep = ~hidden.expand(1, 4, 3, -1)
    mask = keep if kind == "bool" else torch.zeros(1, 4, 3, 400).masked_fill(~keep, -torch.inf)
    wanted = call(expected, attn_mask=mask)
    tokens = set(hidden.nonzero().flatten().tolist())
    state = poisoned(expected.state, tokens, value)
    assert bool(wanted[0].isfinite().all())
    assert_equal(call(expected, **state._asdict(), attn_mask=mask), wanted)


@far
def test_later_near_tokens_do_not_leak_into_causal_queries(capability: str, far: str) -> None:
    case = Case("causal-near", steps=(400,), queries=5, is_causal=True)
    expected = tiers.expected(case, far)
    wanted = call(expected)
    got = call(expected, **poisoned(expected.state, {399}, torch.nan)._asdict())
    for out, same in zip(got[:2], wanted[:2], strict=True):
        assert_same(out[:, :, :4], same[:, :, :4])


@far
def test_far_copies_of_promoted_tokens_are_not_used(capability: str, far: str) -> None:
    """Their scales may be anything."""
    case = Case("promoted-copies", steps=(500,), queries=2)
    expected = tiers.expected(case, far)
    state = expected.state.clone()
    tile, layout = formats.TileFormat(64, 64, 4, 4), formats.FarFormat(64, 64)
    offsets = (tile.key_scale_offset, tile.value_scale_offset)
    if far == "fp8-int4":
        offsets = (layout.key_scale_offset, layout.value_scale_offset)
    for head, slots in enumerate(state.near_index[0].tolist()):
        for token in slots:
            place = token - case.sink_tokens
            if 0 <= place < int(state.lengths[0, formats.QUANTIZED]):
                record = state.tiles[int(state.block_table[0, place // 64]), head]
                for offset in offsets:
                    record[offset + 2 * (place % 64) : offset + 2 * (place % 64) + 2] = 0xFF
    assert_equal(call(expected, **state._asdict()), call(expected))


@far
def test_a_broken_query_leaves_the_others_alone(capability: str, far: str) -> None:
    case = Case("broken-near-query", steps=(400,), queries=3)
    expected = tiers.expected(case, far)
    query = expected.query.clone()
    query[:, 1, 1], query[:, 2, 0] = torch.nan, torch.inf
    same = torch.ones(4, 3, dtype=torch.bool)
    same[1, 1] = same[2, 0] = False
    wanted, got = call(expected), call(expected, query=query)
    for out, good in zip(got[:2], wanted[:2], strict=True):
        assert_same(out[0][same], good[0][same])
    assert not any(x.isnan().any() for x in got[3:5])


@far
def test_no_queries_no_rows_and_no_near_tokens(capability: str, far: str) -> None:
    case = Case("nothing-near", steps=(400,))
    expected = tiers.expected(case, far)
    out, lse, index, score, near, skipped = call(expected, query=torch.empty(1, 4, 0, 64))
    assert out.shape == (1, 4, 0, 64) and lse.shape == (1, 4, 0)
    assert bool((index == -1).all() and (score == -torch.inf).all() and (skipped == 0).all())
    assert bool((near == -torch.inf).all())
    state = expected.state
    empty = {name: x if name == "tiles" else x[:0] for name, x in state._asdict().items()}
    balance = expected.arguments["balance"]
    changes = {"balance": None if balance is None else balance[:0]}
    assert call(expected, **empty, query=torch.empty(0, 4, 3, 64), **changes)[0].shape[0] == 0
    bare = {"near_count": torch.zeros_like(state.near_count),
            "promoted": torch.zeros_like(state.promoted)}  # fmt: skip
    out, lse, index, *_ = call(expected, **bare)
    assert bool(out.isfinite().all() and lse.isfinite().all() and (index >= 0).all())


@far
def test_inputs_are_not_written(capability: str, far: str) -> None:
    for case in by_id("everything", "cut0"):
        expected = tiers.expected(case, far)
        before = [x.clone() for x in (expected.query, *expected.state)]
        call(expected)
        for x, copy in zip((expected.query, *expected.state), before, strict=True):
            assert_same(x, copy)


@far
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_query_and_near_tokens_may_have_different_dtypes(
    tier: str, far: str, dtype: torch.dtype
) -> None:
    for case in by_id("sinks", "padded0", "everything"):
        expected = tiers.expected(case, far)
        query = expected.query.to(dtype)
        out, lse, *_ = call(expected, query=query)
        wanted = call(expected, query=query.float())
        assert out.dtype == dtype
        assert_same(out, wanted[0].to(dtype))
        assert_same(lse, wanted[1])
