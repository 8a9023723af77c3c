"""Attention over two tiers: every token counts once, and what the softmax tells beside."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_kvq
from tests import cases, tiers
from tests.cases import Case
from tests.ops.compare import (
    FAST_LOGIT_STD,
    LSE_BUDGET,
    assert_attention_close,
    assert_same,
    head_error,
)
from tests.tiers import TIER_CASES, TieredState, by_id
from torch_kvq import formats, reference

far = pytest.mark.parametrize("far", tiers.FORMATS)
SCORE_BUDGET = {"exact": 2e-3, "fast": 0.2}
"""Absolute error of the log weights of candidates and near tokens."""


def stored_tokens(case: Case, state: TieredState, far: str, balance: Tensor | None) -> list[Tensor]:
    """Keys and values by token and KV head, float64: the near ones exact, the others decoded."""
    kv = []
    for dim in (case.key_dim, case.value_dim):
        kv.append(torch.full((case.batch, case.kv_heads, case.length, dim), torch.nan).double())
    for row, (start, length, used) in enumerate(state.lengths.tolist()):
        records = state.tiles[state.block_table[row, : -(-used // 64)].long()]
        if far == "tile4":
            assert balance is not None
            decoded = reference.dequantize_tile(
                records, balance[row : row + 1], 4, 4, case.value_dim
            )
        else:
            decoded = reference.dequantize_far(records, case.key_dim, case.value_dim)
        for out, tile, near in zip(kv, decoded, (state.near_key, state.near_value), strict=True):
            flat = tile.transpose(0, 1).flatten(1, 2)[:, :used]
            out[row, :, start + case.sink_tokens : start + case.sink_tokens + used] = flat.double()
            for head, count in enumerate(state.near_count[row].tolist()):
                for slot, token in enumerate(state.near_index[row, head, :count].tolist()):
                    if token >= 0:
                        out[row, head, start + token] = near[row, head, slot].double()
        assert not any(out[row, :, start:length].isnan().all(-1).any() for out in kv)
    return kv


def naive_scores(case: Case, state: TieredState, query: Tensor, key: Tensor) -> Tensor:
    """Scores in float64, dense over positions, -inf where masked."""
    mask = cases.make_mask(case)
    key = key.repeat_interleave(case.heads // case.kv_heads, 1)
    position = torch.arange(case.length)
    query_position = (case.length - case.queries + torch.arange(case.queries))[:, None]
    allowed = position >= state.lengths[:, 0].view(-1, 1, 1, 1)
    if case.is_causal:
        allowed = allowed & (position <= query_position)
    if case.sliding_window is not None:
        allowed = allowed & (position > query_position - case.sliding_window)
    scale = case.key_dim**-0.5 if case.scale is None else case.scale
    score = query.double() @ key.nan_to_num(0).mT * scale
    if case.softcap is not None:
        score = (score / case.softcap).tanh() * case.softcap
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask[..., : case.length]
    elif mask is not None:
        score = score + mask[..., : case.length].double()
        allowed = allowed & (mask[..., : case.length].double() > -8192)
    return score.masked_fill(~allowed, -torch.inf)


@far
@pytest.mark.parametrize("case", TIER_CASES, ids=str)
def test_reference_counts_every_token_once(case: Case, far: str) -> None:
    """The denominator and the output are those of float64 over tokens by position."""
    state, query, arguments, results = tiers.expected(case, far)
    key, value = stored_tokens(case, state, far, arguments["balance"])
    score = naive_scores(case, state, query, key)
    sinks = torch.full((case.heads,), -torch.inf) if not case.sinks else arguments["sinks"]
    sinks = sinks.double().view(1, -1, 1, 1).expand(*score.shape[:3], 1)
    lse = torch.cat((score, sinks), -1).logsumexp(-1)
    weight = (score - lse[..., None]).exp().nan_to_num(0)
    out = weight @ value.repeat_interleave(case.heads // case.kv_heads, 1).nan_to_num(0)
    assert head_error(results[0], out) < (1e-4 if case.data == "large" else 1e-5)
    torch.testing.assert_close(results[1].double(), lse, rtol=1e-5, atol=1e-5)
    logs = (score - lse[..., None]).nan_to_num(-torch.inf, neginf=-torch.inf)
    logs = logs.unflatten(1, (case.kv_heads, -1)).amax((2, 3))
    _check_best(case, state, logs, results)


def _check_best(case: Case, state: TieredState, logs: Tensor, results: tuple[Tensor, ...]) -> None:
    """Candidates and near scores against the greatest log weight of every position."""
    _, _, index, score, near, _ = results
    for row, (start, _, used) in enumerate(state.lengths.tolist()):
        for head, count in enumerate(state.near_count[row].tolist()):
            # An empty slot, -1, finds the last element.
            by_token = torch.nn.functional.pad(logs[row, head, start:], (0, 1), value=-torch.inf)
            slots = state.near_index[row, head, :count].long()
            wanted = by_token[slots]
            torch.testing.assert_close(
                near[row, head, :count].double(), wanted, rtol=1e-5, atol=1e-4
            )
            assert bool((near[row, head, count:] == -torch.inf).all())
            free = by_token.clone()
            free[slots] = -torch.inf
            far = free[case.sink_tokens : case.sink_tokens + used]
            best = far.sort(descending=True).values[: index.shape[2]]
            best = best[best > -torch.inf]
            n = len(best)
            torch.testing.assert_close(score[row, head, :n].double(), best, rtol=1e-5, atol=1e-4)
            assert bool(
                (score[row, head, n:] == -torch.inf).all() and (index[row, head, n:] == -1).all()
            )
            tokens = index[row, head, :n].long()
            assert len(set(tokens.tolist())) == n
            torch.testing.assert_close(free[tokens], best, rtol=1e-5, atol=1e-4)


def check_close(
    case: Case, got: tuple[Tensor, ...], wanted: tuple[Tensor, ...], precision: str
) -> None:
    """All results against those of the reference."""
    assert_attention_close(got[0], got[1], wanted[0], wanted[1], precision)
    tolerance = SCORE_BUDGET[precision]
    torch.testing.assert_close(got[3], wanted[3], rtol=1e-5, atol=tolerance)
    torch.testing.assert_close(got[4], wanted[4], rtol=1e-5, atol=tolerance)
    assert_same(got[2] < 0, wanted[2] < 0)
    # Tokens whose scores lie further apart than the error come in the same order.
    gap = wanted[3][..., :-1] - wanted[3][..., 1:] > 2 * tolerance
    end = torch.ones_like(wanted[3][..., :1], dtype=torch.bool)
    alone = torch.cat((end, gap), -1) & torch.cat((gap, ~end), -1)
    assert_same(got[2][alone], wanted[2][alone])


@far
@pytest.mark.parametrize("case", TIER_CASES, ids=str)
def test_kernel_is_within_the_budget(tier: str, case: Case, far: str) -> None:
    state, query, arguments, wanted = tiers.expected(case, far)
    for precision in ("exact", "fast"):
        if precision == "fast" and case.logit_std > FAST_LOGIT_STD:
            continue
        got = torch_kvq.tiered_attention(query, *state, **arguments, precision=precision)
        assert got[0].dtype == case.dtype
        check_close(case, got, wanted, precision)


@far
def test_the_denominator_is_exact_for_any_promoted_tokens(capability: str, far: str) -> None:
    """Random promotion changes no weight where the far copies are exact."""
    case = Case("denominator", steps=(900,), queries=3, is_causal=True, dtype=torch.float16)
    state, balance = tiers.make_tiers(case, far)
    query, arguments = cases.make_query(case), tiers.tier_arguments(case, far, balance)
    key, value = stored_tokens(case, state, far, balance)
    exact = naive_scores(case, state, query, key).logsumexp(-1)
    lse = torch_kvq.tiered_attention(query, *state, **arguments)[1]
    torch.testing.assert_close(lse.double(), exact, rtol=0, atol=LSE_BUDGET["exact"][1])


@far
def test_a_token_is_in_one_tier_at_a_time(capability: str, far: str) -> None:
    """A value that only one token has arrives once, from the tier that holds the token."""
    case = Case("own-token", steps=(500,), sink_tokens=4)
    state, balance = tiers.make_tiers(case, far)
    arguments = tiers.tier_arguments(case, far, balance)
    state.near_value[state.near_value.isfinite()] = 1.0
    query = torch.zeros(1, 4, 1, 64)
    out, lse, *_ = torch_kvq.tiered_attention(query, *state, **arguments)
    torch.testing.assert_close(lse, torch.full_like(lse, 500.0).log(), rtol=1e-6, atol=1e-5)
    _, value = stored_tokens(case, state, far, balance)
    wanted = value.mean(2).repeat_interleave(2, 1).unsqueeze(2)
    torch.testing.assert_close(out.double(), wanted, rtol=2e-3, atol=2e-4)


def promote(state: TieredState, case: Case, head: int, token: int) -> TieredState:
    """The state with one more token in the near tier of a head."""
    state = state.clone()
    slot = int(state.near_count[0, head])
    key, value = tiers.row_tokens(case, 0)
    state.near_index[0, head, slot] = token
    state.near_key[0, head, slot] = key[head, token]
    state.near_value[0, head, slot] = value[head, token]
    state.near_count[0, head] += 1
    place = token - case.sink_tokens
    state.promoted[0, head, place // 64] |= torch.tensor(1) << place % 64
    return state


@far
def test_a_promoted_candidate_makes_room_for_the_next(capability: str, far: str) -> None:
    case = Case("promotion", steps=(700,), logit_std=3.0)
    state, query, arguments, _ = tiers.expected(case, far)
    before = torch_kvq.tiered_attention(query, *state, **arguments)
    token = int(before[2][0, 1, 0])
    after = torch_kvq.tiered_attention(query, *promote(state, case, 1, token), **arguments)
    assert_same(after[2][0, 0], before[2][0, 0])
    assert_same(after[2][0, 1, :-1], before[2][0, 1, 1:])
    slot = int(state.near_count[0, 1])
    assert abs(float(after[4][0, 1, slot] - before[3][0, 1, 0])) < 0.5


@far
def test_equal_candidates_come_in_order(capability: str, far: str) -> None:
    case = Case("ties", steps=(600,), data="equal")
    state, query, arguments, _ = tiers.expected(case, far)
    index = torch_kvq.tiered_attention(query, *state, **arguments)[2]
    for head in range(2):
        near = set(state.near_index[0, head].tolist())
        tokens = range(4, 4 + int(state.lengths[0, 2]))
        wanted = [token for token in tokens if token not in near][:8]
        assert index[0, head].tolist() == wanted


@far
@pytest.mark.parametrize("count", (0, 1, 16, 64))
def test_candidates_are_as_many_as_asked_for(capability: str, far: str, count: int) -> None:
    case = by_id("padded0")[0]
    state, query, arguments, _ = tiers.expected(case, far)
    got = torch_kvq.tiered_attention(query, *state, **arguments, candidates=count)
    most = torch_kvq.tiered_attention(query, *state, **arguments, candidates=64)
    assert got[2].shape == got[3].shape == (*state.near_count.shape, count)
    assert_same(got[2], most[2][..., :count])
    assert_same(got[3], most[3][..., :count])
    assert got[4].shape[2] == (state.near_index.shape[2] if count else 0)


@far
def test_values_of_small_weight_are_not_read(capability: str, far: str) -> None:
    """Those of a tile with a low bias, all but the promoted ones, which have no far copy."""
    case = Case("small-weights", steps=(1000,))
    state, query, arguments, _ = tiers.expected(case, far)
    mask = torch.zeros(1, 1, 1, 1000)
    mask[..., 4 + 128 : 4 + 192] = -40.0
    arguments = {**arguments, "attn_mask": mask}
    plain = torch_kvq.tiered_attention(query, *state, **arguments)
    promoted = [bin(mask & (2**64 - 1)).count("1") for mask in state.promoted[0, :, 2].tolist()]
    assert plain[5].tolist() == [[64 - count for count in promoted]]
    if capability == "reference":
        return
    tile, layout = formats.TileFormat(64, 64, 4, 4), formats.FarFormat(64, 64)
    offset = tile.value_scale_offset if far == "tile4" else layout.value_scale_offset
    dirty = state.clone()
    dirty.tiles[state.block_table[0, 2].long(), :, offset : offset + 128] = 0xFF
    for got, same in zip(
        torch_kvq.tiered_attention(query, *dirty, **arguments), plain, strict=True
    ):
        assert_same(got, same)


@far
def test_kernels_skip_no_more_than_the_reference(tier: str, far: str) -> None:
    case = Case("skipping", steps=(1500,), logit_std=6.0)
    state, query, arguments, wanted = tiers.expected(case, far)
    got = torch_kvq.tiered_attention(query, *state, **arguments)
    assert bool((got[5] <= wanted[5]).all()) and bool((wanted[5] > 100).all())
    if far == "fp8-int4":
        assert bool((got[5] > 0).all())
