"""Tiered layers beside the whole keys and values of their tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import torch_kvq
from torch_kvq import _tier_checks
from torch_kvq.cache.pages import FREED
from torch_kvq.cache.tiered_layer import TieredLayer
from torch_kvq.cache.tiered_state import TieredState
from torch_kvq.formats import TILE_TOKENS

HEADS, DIM = 2, 32
SMALL: dict[str, Any] = {"quantized_start": 80, "window": 10, "near_ratio": 0.25}

FAR_ERROR = {"fp8-int4": 0.15, "tile4": 0.2}
"""Of decoded tokens, as a part of their norm."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def mask_of(start: list[int], queries: int, length: int) -> Tensor:
    position = torch.arange(length)
    causal = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    return (causal & (position >= torch.tensor(start).view(-1, 1, 1))).unsqueeze(1)


def step(layer: TieredLayer, data: Tensor, start: list[int], query: Tensor | None = None) -> Tensor:
    """Append ``data[2, batch, kv_heads, tokens, dim]`` and attend."""
    layer.update(*data)
    if query is None:
        query = normal(data.shape[1], 2 * HEADS, data.shape[3], DIM, seed=data.shape[3])
    return layer.attend(query, mask_of(start, query.shape[2], int(layer.get_seq_length())))


def near_tokens(state: TieredState, row: int, head: int) -> list[int]:
    """Tokens in the near slots of a head, in use or not empty."""
    count = int(state.near_count[row, head])
    return [token for token in state.near_index[row, head, :count].tolist() if token >= 0]


def check_counted_once(state: TieredState) -> None:
    """Every token of every head is near or in a tile that is not masked for it, and never both.

    Those of tiles that were given up are neither.
    """
    for row, (start, length, quantized) in enumerate(state.lengths.tolist()):
        bits = _tier_checks.promoted_bits(state.promoted[row], quantized)
        sinks = state.options.sink_tokens
        freed = state.table.rows[row].count(FREED) * TILE_TOKENS
        held = [t for t in range(max(length - start, 0)) if not sinks <= t < sinks + freed]
        for head in range(state.kv_heads):
            assert not bits[head, :freed].any()
            far = (~bits[head, freed:]).nonzero().flatten() + sinks + freed
            assert sorted([*near_tokens(state, row, head), *far.tolist()]) == held


def check_denominator(layer: TieredLayer, start: list[int]) -> None:
    """The log-sum-exp of the operator is that of the decoded keys in float64."""
    state = layer.state
    assert state is not None
    query = normal(state.batch_size, 2 * HEADS, 1, DIM, seed=9)
    balance = state.balance if state.balance.shape[2] else None
    window = state.options.sliding_window
    lse = torch_kvq.tiered_attention(
        query,
        *state.tensors,
        balance=balance,
        far=layer.options.far,
        sink_tokens=4,
        sliding_window=window,
    )[1]
    key, _ = state.decode(state.length)
    score = query.double() @ key.double().repeat_interleave(2, 1).mT * DIM**-0.5
    first = 0 if window is None else state.length - window
    hidden = torch.arange(state.length) < torch.tensor(start).clamp(min=first).view(-1, 1, 1, 1)
    expected = score.masked_fill(hidden, -torch.inf).logsumexp(-1)
    # Tiles of 4 bits are scored in integers.
    torch.testing.assert_close(lse.double(), expected, atol=2e-3, rtol=0)


def check_tokens(layer: TieredLayer, data: Tensor, start: list[int], is_cut: bool = False) -> None:
    """Near tokens are as they came and far ones close to it."""
    state = layer.state
    assert state is not None and state.length == data.shape[3]
    decoded = torch.stack(state.decode(state.length))
    for row, first in enumerate(start):
        want = data[:, row, :, first:]
        got = decoded[:, row, :, first:]
        limit = FAR_ERROR[layer.options.far]
        assert (got - want).norm() <= limit * want.norm()
        for head in range(0 if is_cut else HEADS):
            tokens = near_tokens(state, row, head)
            assert torch.equal(got[:, head, tokens], want[:, head, tokens])


def check(layer: TieredLayer, data: Tensor, start: list[int], is_cut: bool = False) -> None:
    """All of these."""
    layer.flush()
    assert layer.state is not None
    check_counted_once(layer.state)
    check_denominator(layer, start)
    check_tokens(layer, data, start, is_cut)
