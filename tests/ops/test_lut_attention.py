"""Attention over packed layers: meaning and accuracy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import torch_kvq
from tests import cases
from tests.cases import CASES, Case, State
from tests.ops.compare import FAST_LOGIT_STD, assert_attention_close, assert_same, head_error
from torch_kvq import reference

MERGED = ("dim64", "bits3-3-dim128", "padded0", "long", "sinks", "mask-bool_heads", "cut0")


def by_id(*ids: str) -> list[Case]:
    return [case for case in CASES if case.id in ids]


def stored_tokens(case: Case, state: State) -> tuple[Tensor, Tensor]:
    """Keys and values by position, float64, NaN in the padding; written from docs/formats.md."""
    shape = (case.batch, case.kv_heads, case.length)
    key = torch.full((*shape, case.key_dim), torch.nan, dtype=torch.float64)
    value = torch.full((*shape, case.value_dim), torch.nan, dtype=torch.float64)
    dtype = case.dtype if case.layout.is_pass_through else torch.float32
    for row, (start, length, used) in enumerate(state.lengths.tolist()):
        pages = state.block_table[row, : -(-used // 64)].long()
        records = reference.dequantize_tile(
            state.tiles[pages], state.balance[row : row + 1], *case.bits, case.value_dim, dtype
        )
        exact = (state.exact_key[row], state.exact_value[row])
        for out, tiles, buffer in zip((key, value), records, exact, strict=True):
            stored = torch.cat((tiles.transpose(0, 1).flatten(1, 2), buffer.to(tiles.dtype)), 1)
            first, end = case.sink_tokens, case.sink_tokens + used
            for t in range(length - start):
                inside = first <= t < end
                at = t - first if inside else 64 * len(pages) + (t if t < first else t - used)
                out[row, :, start + t] = stored[:, at]
    return key, value


def naive_attention(case: Case, state: State, query: Tensor) -> tuple[Tensor, Tensor]:
    """Attention in float64, dense over positions."""
    arguments, (key, value) = cases.attention_arguments(case), stored_tokens(case, state)
    group, length = case.heads // case.kv_heads, case.length
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = case.key_dim**-0.5 if case.scale is None else case.scale
    position = torch.arange(length)
    query_position = (length - case.queries + torch.arange(case.queries))[:, None]
    allowed = position >= state.lengths[:, 0].view(-1, 1, 1, 1)
    if case.is_causal:
        allowed = allowed & (position <= query_position)
    if case.sliding_window is not None:
        allowed = allowed & (position > query_position - case.sliding_window)
    score = query.double() @ key.nan_to_num(0).mT * scale
    if case.softcap is not None:
        score = (score / case.softcap).tanh() * case.softcap
    mask = arguments["attn_mask"]
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask[..., :length]
    elif mask is not None:
        score = score + mask[..., :length].double()
        allowed = allowed & (mask[..., :length].double() > -8192)
    score = score.masked_fill(~allowed, -torch.inf)
    sinks = torch.full((case.heads,), -torch.inf) if not case.sinks else arguments["sinks"]
    sinks = sinks.double().view(1, -1, 1, 1).expand(*score.shape[:3], 1)
    lse = torch.cat((score, sinks), -1).logsumexp(-1)
    weight = (score - lse[..., None]).exp().nan_to_num(0)
    return weight @ value.nan_to_num(0), lse


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference_is_attention_over_the_stored_tokens(case: Case) -> None:
    expected = cases.expected(case)
    out, lse = naive_attention(case, expected.state, expected.query)
    assert head_error(expected.out, out) < (1e-4 if case.data == "large" else 1e-5)
    torch.testing.assert_close(expected.lse.double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_within_the_budget(tier: str, case: Case) -> None:
    expected = cases.expected(case)
    for precision in ("exact", "fast"):
        if precision == "fast" and case.logit_std > FAST_LOGIT_STD:
            continue
        out, lse = torch_kvq.lut_attention(
            expected.query, *expected.state, **expected.arguments, precision=precision
        )
        assert out.dtype == case.dtype and lse.dtype == torch.float32
        assert_attention_close(out, lse, expected.out, expected.lse, precision)


@pytest.mark.parametrize("case", by_id("sinks", "padded0", "everything", "bits2-2-dim64"), ids=str)
def test_query_and_cache_may_have_different_dtypes(tier: str, case: Case) -> None:
    expected = cases.expected(case)
    for dtype in cases.DTYPES:
        query = expected.query.to(dtype)
        wanted = reference.lut_attention(query.float(), *expected.state, **expected.arguments)
        out, lse = torch_kvq.lut_attention(query, *expected.state, **expected.arguments)
        assert out.dtype == dtype
        assert_attention_close(out, lse, *wanted, "exact")


@pytest.mark.parametrize("case", by_id(*MERGED), ids=str)
def test_parts_merge_by_their_lse(capability: str, case: Case) -> None:
    """Two calls that share out the positions are the whole call; only one has the sinks."""
    expected = cases.expected(case)
    first = torch.rand(case.length, generator=case.generator("parts")) < 0.4
    given = expected.arguments["attn_mask"]
    parts = []
    for positions, sinks in ((first, expected.arguments["sinks"]), (~first, None)):
        mask = positions.expand(1, 1, case.queries, -1)
        mask = mask if given is None else mask & given
        arguments = {**expected.arguments, "attn_mask": mask, "sinks": sinks}
        parts.append(torch_kvq.lut_attention(expected.query.float(), *expected.state, **arguments))
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    weights = [(part[1] - lse).exp().nan_to_num(0)[..., None] for part in parts]
    merged = sum(part[0] * weight for part, weight in zip(parts, weights, strict=True))
    assert isinstance(merged, Tensor)
    assert_attention_close(merged, lse, expected.out, expected.lse, "exact")


@pytest.mark.parametrize("case", by_id("queries64", "padded1-causal", "chunks"), ids=str)
def test_a_block_of_queries_is_its_queries_one_by_one(capability: str, case: Case) -> None:
    """Causal queries see what they would see at the end of a shorter layer."""
    expected = cases.expected(case)
    out, lse = torch_kvq.lut_attention(
        expected.query.float(), *expected.state, **expected.arguments
    )
    exact = case.length - int(expected.state.lengths[0, 0] + expected.state.lengths[0, 2])
    for back in range(0, min(case.queries, exact - case.sink_tokens), 9):
        shorter = expected.state.clone()
        cases.cut(shorter, back, case.sink_tokens)
        at = case.queries - 1 - back
        single = torch_kvq.lut_attention(
            expected.query[:, :, at : at + 1].float(), *shorter, **expected.arguments
        )
        assert_attention_close(*single, out[:, :, at : at + 1], lse[:, :, at : at + 1], "exact")


def test_window_of_one_returns_the_value_of_the_position(capability: str) -> None:
    case = Case("own-value", steps=(100,), queries=5)
    state, (_, value) = cases.make_state(case), cases.make_tokens(case)
    out, _ = torch_kvq.lut_attention(
        cases.make_query(case), *state, is_causal=True, sliding_window=1
    )
    wanted = value[:, :, -5:].repeat_interleave(2, 1)
    torch.testing.assert_close(out, wanted, rtol=1e-6, atol=1e-6)


def test_sinks_take_weight_from_every_key(capability: str) -> None:
    case = Case("sink-weight", steps=(300,))
    state, query = cases.make_state(case), cases.make_query(case)
    plain, lse = torch_kvq.lut_attention(query, *state)
    out, total = torch_kvq.lut_attention(query, *state, sinks=lse[0, :, 0])
    torch.testing.assert_close(out, plain / 2, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(total, lse + torch.log(torch.tensor(2.0)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_a_query_without_keys_gives_zeros(capability: str, dtype: torch.dtype) -> None:
    case = Case("nothing-seen", steps=(300,), starts=(0, 300), dtype=dtype)
    state, query = cases.make_state(case), cases.make_query(case)
    hidden = torch.zeros(1, 1, 1, 300, dtype=torch.bool)
    lowest = torch.full((1, 1, 1, 300), torch.finfo(dtype).min, dtype=dtype)
    for mask in (hidden, lowest, lowest - torch.inf):
        out, lse = torch_kvq.lut_attention(query, *state, mask)
        assert_same(out, torch.zeros_like(out))
        assert_same(lse, torch.full_like(lse, -torch.inf))
        _, lse = torch_kvq.lut_attention(query, *state, mask, sinks=torch.ones(4))
        torch.testing.assert_close(lse, torch.ones_like(lse))
    out, lse = torch_kvq.lut_attention(query, *state)
    assert bool((out[1] == 0).all()) and bool((lse[1] == -torch.inf).all())


@pytest.mark.parametrize("precision", ("exact", "fast"))
def test_a_low_bias_is_a_bias_above_the_bound(capability: str, precision: str) -> None:
    """A row of equal biases changes nothing but the lse, down to where values count as masked."""
    case = Case("bias", steps=(300,))
    state, query = cases.make_state(case), cases.make_query(case)
    plain, lse = torch_kvq.lut_attention(query, *state, precision=precision)
    bias = torch.full((1, 1, 1, 300), -8000.0)
    out, low = torch_kvq.lut_attention(query, *state, bias, precision=precision)
    assert head_error(out, plain) < 2e-3
    torch.testing.assert_close(low, lse - 8000, rtol=1e-6, atol=1e-3)
    out, low = torch_kvq.lut_attention(query, *state, bias - 192, precision=precision)
    assert bool((out == 0).all()) and bool((low == -torch.inf).all())


def test_no_queries_and_no_rows(capability: str) -> None:
    case = Case("no-queries", steps=(300,))
    state = cases.make_state(case)
    out, lse = torch_kvq.lut_attention(torch.empty(1, 4, 0, 64), *state)
    assert out.shape == (1, 4, 0, 64) and lse.shape == (1, 4, 0)
    empty = cases.empty_state(replace(case, starts=()))
    out, lse = torch_kvq.lut_attention(torch.empty(0, 4, 3, 64), *empty)
    assert out.shape == (0, 4, 3, 64) and lse.shape == (0, 4, 3)


def test_full_precision_tokens_give_full_precision(tier: str) -> None:
    """While nothing is in tiles the kernel is plain float32 attention."""
    for case in by_id("length255", "length256", "queries-before-start"):
        expected = cases.expected(case)
        assert not expected.state.lengths[:, 2].any()
        out, lse = torch_kvq.lut_attention(
            expected.query.float(), *expected.state, **expected.arguments
        )
        assert head_error(out, expected.out) < 2e-6
        torch.testing.assert_close(lse, expected.lse, rtol=1e-6, atol=1e-5)
