"""Tiered layers made of the cases of the table: the same tokens, queries, masks and lengths."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests import cases
from tests.cases import CASES, Case
from torch_kvq import formats, reference

FORMATS = formats.FAR_FORMATS
NEAR_SHARE = 0.1
"""Share of the far tokens that is promoted."""


class TieredState(NamedTuple):
    """State of a tiered layer in the order of the operator's arguments."""

    near_key: Tensor
    near_value: Tensor
    near_index: Tensor
    near_count: Tensor
    tiles: Tensor
    block_table: Tensor
    promoted: Tensor
    lengths: Tensor

    def clone(self) -> TieredState:
        """Copy of every tensor."""
        return TieredState(*(tensor.clone() for tensor in self))


def row_lengths(case: Case) -> Tensor:
    """int32 ``[batch, 3]`` after the steps of a case."""
    used = [list(cases._row_history(case, start))[-1][1] for start in case.starts]
    rows = [(s, case.length, q) for s, q in zip(case.starts, used, strict=True)]
    return torch.tensor(rows, dtype=torch.int32).view(-1, 3)


def row_tokens(case: Case, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a row without its padding, ``[kv_heads, tokens, dim]``."""
    end = max(case.length, case.starts[row])
    key, value = (x[row, :, case.starts[row] : end] for x in cases.make_tokens(case))
    return key, value


def _pages(case: Case, far: str, state: TieredState, balance: Tensor, library: Any) -> None:
    """Encode the far tokens of every row into its pages; what is behind them is poison."""
    for row, (_, _, quantized) in enumerate(state.lengths.tolist()):
        key, value = row_tokens(case, row)
        for tile in range(-(-quantized // 64)):
            first = case.sink_tokens + 64 * tile
            k, v = (
                x[:, first : min(first + 64, case.sink_tokens + quantized)] for x in (key, value)
            )
            short = (0, 0, 0, 64 - k.shape[1])
            k, v = (torch.nn.functional.pad(x, short).unsqueeze(0) for x in (k, v))
            if far == "tile4":
                if tile == 0:
                    balance[row] = library.key_balance(key[None, :, case.sink_tokens :])[0]
                record = library.quantize_tile(k, v, balance[row : row + 1], 4, 4)
                scales = (
                    0,
                    formats.TileFormat(case.key_dim, case.value_dim, 4, 4).value_scale_offset,
                )
            else:
                record = library.quantize_far(k, v)
                layout = formats.FarFormat(case.key_dim, case.value_dim)
                scales = (0, layout.value_scale_offset, layout.value_middle_offset)
            for offset in scales if short[-1] else ():
                record[..., offset + 2 * (64 - short[-1]) : offset + 128] = 0xFF
            state.tiles[state.block_table[row, tile].long()] = record[0]


def _recent(case: Case, tokens: int, quantized: int) -> Tensor:
    """Tokens of a row that are not far: sink tokens and window."""
    end = case.sink_tokens + quantized
    first = torch.arange(min(case.sink_tokens, tokens))
    return torch.cat((first, torch.arange(end, max(tokens, end))))


def _near(case: Case, state: TieredState) -> None:
    """Fill the near slots of every head in an order of its own, with some left empty."""
    generator = case.generator("near")
    for row, (start, length, quantized) in enumerate(state.lengths.tolist()):
        recent = _recent(case, max(length - start, 0), quantized)
        for head in range(case.kv_heads):
            chosen = torch.rand(quantized, generator=generator) < NEAR_SHARE
            chosen = chosen.nonzero().flatten() + case.sink_tokens
            near = torch.cat((recent, chosen, torch.full((3 * head,), -1)))
            near = near[torch.randperm(len(near), generator=generator)]
            _fill_head(case, state, row, head, near)


def _fill_head(case: Case, state: TieredState, row: int, head: int, near: Tensor) -> None:
    """Let a head have these near tokens, -1 for an empty slot."""
    key, value = row_tokens(case, row)
    quantized = int(state.lengths[row, formats.QUANTIZED])
    state.near_index[row, head, : len(near)] = near.int()
    state.near_count[row, head] = len(near)
    slots = (near >= 0).nonzero().flatten()
    state.near_key[row, head, slots] = key[head, near[slots]]
    state.near_value[row, head, slots] = value[head, near[slots]]
    state.promoted[row, head] = 0
    for place in (near - case.sink_tokens).tolist():
        if 0 <= place < quantized:
            bit = 1 << place % 64
            state.promoted[row, head, place // 64] |= bit - (bit >> 63 << 64)


def choose_near(case: Case, state: TieredState, query: Tensor) -> None:
    """Make those far tokens near that have the greatest weight, a tenth of all tokens near."""
    key = cases.make_tokens(case)[0]
    score = (query @ key.repeat_interleave(case.heads // case.kv_heads, 1).mT).softmax(-1)
    mass = score.unflatten(1, (case.kv_heads, -1)).sum((2, 3))
    quantized = int(state.lengths[0, formats.QUANTIZED])
    far = mass[0, :, case.sink_tokens : case.sink_tokens + quantized]
    recent = _recent(case, case.length, quantized)
    count = max(case.length // 10 - len(recent), 0)
    for head in range(case.kv_heads):
        chosen = far[head].topk(count).indices + case.sink_tokens
        _fill_head(case, state, 0, head, torch.cat((recent, chosen)))


def make_tiers(case: Case, far: str, library: Any = reference) -> tuple[TieredState, Tensor | None]:
    """State and balance: exactly large enough, pages shuffled, all that is unused poisoned.

    ``library`` has the encoders: the references, or ``torch.ops.kvq`` where that takes too long.
    """
    lengths = row_lengths(case)
    heads, pages = case.kv_heads, int(-(-lengths[:, 2].max() // 64)) + 1 if case.batch else 1
    total = case.batch * pages + 1
    table = torch.randperm(total, generator=case.generator("pages"))[: case.batch * pages]
    held = (lengths[:, 1] - lengths[:, 0]).clamp(min=0) - lengths[:, 2]
    room = int((held + lengths[:, 2] // 4).max()) + 3 * heads + 9 if case.batch else 0
    record_bytes = formats.far_record_bytes(far, case.key_dim, case.value_dim)
    shape = (case.batch, heads, room)
    state = TieredState(
        torch.full((*shape, case.key_dim), torch.nan, dtype=case.dtype),
        torch.full((*shape, case.value_dim), torch.nan, dtype=case.dtype),
        torch.full(shape, -(2**30), dtype=torch.int32),
        torch.zeros(shape[:2], dtype=torch.int32),
        torch.full((total, heads, record_bytes), 0xFF, dtype=torch.uint8),
        table.int().view(case.batch, pages),
        torch.zeros(*shape[:2], pages, dtype=torch.int64),
        lengths,
    )
    balance = torch.full((case.batch, heads, case.key_dim), torch.nan)
    _pages(case, far, state, balance, library)
    _near(case, state)
    for row, (_, _, quantized) in enumerate(lengths.tolist()):
        state.block_table[row, -(-quantized // 64) :] = -(2**30) - row
        state.promoted[row, :, quantized // 64 + (quantized % 64 > 0) :] = -1
        if quantized % 64:
            state.promoted[row, :, quantized // 64] |= -1 << quantized % 64
    return state, balance if far == "tile4" else None


def tier_arguments(case: Case, far: str, balance: Tensor | None) -> dict[str, Any]:
    """Everything but query and state of a call."""
    arguments = cases.attention_arguments(case)
    del arguments["key_bits"], arguments["value_bits"]
    return {**arguments, "far": far, "balance": balance}


class Expected(NamedTuple):
    """What the reference makes of a case; shared between tests, so not to be written to."""

    state: TieredState
    query: Tensor
    arguments: dict[str, Any]
    results: tuple[Tensor, ...]


@functools.cache
def expected(case: Case, far: str) -> Expected:
    """State, call and results of a case by the reference."""
    state, balance = make_tiers(case, far)
    query, arguments = cases.make_query(case), tier_arguments(case, far, balance)
    results = reference.tiered_attention(query.float(), *state, **arguments)
    return Expected(state, query, arguments, results)


# Shared pages would share near tokens, and bits other than 4 are no far format.
TIER_CASES = tuple(
    replace(case, bits=(4, 4))
    for case in CASES
    if not case.shared_pages and "bits" not in case.id and not case.id.endswith(("3bit", "-4bit"))
)


def by_id(*ids: str) -> list[Case]:
    """Cases of the table by their names."""
    return [case for case in TIER_CASES if case.id in ids]
