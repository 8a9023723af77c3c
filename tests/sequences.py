"""Caches under any sequence of operations, against rows of plain token numbers."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from tests.rows import (
    BITS,
    DIM,
    HEADS,
    RULE,
    SINKS,
    TOKENS,
    Held,
    Row,
    check_pages,
    check_tokens,
    tokens_of,
    vocabulary,
)
from torch_kvq import KVQLayer, formats
from torch_kvq.cache import pages
from torch_kvq.cache.pages import PagePool

SETTINGS = settings(
    max_examples=16, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
"""The same sequences in every run."""

LONGEST, MOST_ROWS, MOST_CACHES = 400, 3, 3
WHICH = strategies.integers(0, MOST_CACHES - 1)
ROWS = strategies.integers(1, MOST_ROWS)
DEPTH = strategies.sampled_from([1, 3, 5, 9, 20, 40, 64, 90, 130, 400])
SELECTION = strategies.lists(strategies.integers(0, 2), min_size=1, max_size=MOST_ROWS)
PADDING = strategies.tuples(*[strategies.sampled_from([0, 0, 0, 0.1, 0.3, 0.6, 1])] * MOST_ROWS)
"""Share of each row's new tokens that is padding."""


class Caches(RuleBasedStateMachine):
    """Up to three caches, some of which are forks of others; every step checks all of them.

    Pools are watched beyond the caches that they belonged to: those have to give all pages back.
    """

    options: dict[str, Any] = {}
    make_cache: Callable[..., Any]

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []
        self.pools: list[PagePool] = []
        self.next_id = 0

    @initialize(rows=ROWS, padding=PADDING)
    def begin(self, rows: int, padding: tuple[float, ...]) -> None:
        self.held.append(Held(self.new_cache()))
        self.append(0, 130, rows)
        self.attend(0, padding)

    def new_cache(self) -> Any:
        """A cache of two layers."""
        cache = type(self).make_cache(16, **RULE, **self.options)
        cache.layers = [KVQLayer(bits, **RULE, **self.options) for bits in BITS]
        return cache

    def check_held(self, held: Held) -> None:
        """A cache holds what its rows say."""
        check_tokens(held)

    def check_outputs(self, outputs: list[Tensor], want: list[Tensor]) -> None:
        """Attention of both layers; only the first is lossless."""
        torch.testing.assert_close(outputs[0], want[0], rtol=1e-4, atol=1e-4)

    def pick(self, which: int) -> Held:
        return self.held[which % len(self.held)]

    @rule(which=WHICH, tokens=strategies.sampled_from([1, 2, 7, 50]), rows=ROWS)
    def append(self, which: int, tokens: int, rows: int) -> None:
        held = self.pick(which)
        tokens = min(tokens, LONGEST - held.length)
        if not tokens:
            return
        held.settle()
        if not held.length:
            held.rows = [Row() for _ in range(rows)]
        if any(row.start >= held.length for row in held.rows):
            held.waiting = tokens
        for row in held.rows:
            row.ids += range(self.next_id, self.next_id + tokens)
            self.next_id = (self.next_id + tokens) % (TOKENS // 2)
        with self.appending(held):
            for index in range(len(BITS)):
                new = tokens_of([row.ids[-tokens:] for row in held.rows], index)
                held.cache.update(*new, layer_idx=index)

    @rule(tokens=strategies.sampled_from([64, 65, 130, 200]), rows=ROWS)
    def append_to_all(self, tokens: int, rows: int) -> None:
        for which in range(len(self.held)):
            self.append(which, tokens, rows)

    @rule(which=WHICH, padding=PADDING)
    def attend(self, which: int, padding: tuple[float, ...]) -> None:
        held = self.pick(which)
        if not held.length:
            return
        queries = held.waiting or min(3, held.length)
        held.settle([int(share * held.waiting) for share in padding])
        position = torch.arange(held.length)
        starts = torch.tensor([row.start for row in held.rows]).view(-1, 1, 1)
        causal = torch.ones(queries, held.length, dtype=torch.bool).tril(held.length - queries)
        mask = (causal & (position >= starts)).unsqueeze(1)
        query = vocabulary()[0, 0, : len(held.rows) * queries].view(-1, queries, HEADS, DIM)
        query = query.transpose(1, 2)
        with self.appending(held):
            outputs = [layer.attend(query, mask) for layer in held.cache.layers]
        whole = [tokens_of([row.ids for row in held.rows], index) for index in range(len(BITS))]
        attention = torch.nn.functional.scaled_dot_product_attention
        want = [attention(query, *tokens, attn_mask=mask) for tokens in whole]
        has_keys = mask.any(-1, keepdim=True)
        self.check_outputs([x * has_keys for x in outputs], [x * has_keys for x in want])

    @rule(
        which=WHICH,
        depth=DEPTH,
        is_absolute=strategies.booleans(),
        from_tiles=strategies.booleans(),
    )
    def crop(self, which: int, depth: int, is_absolute: bool, from_tiles: bool) -> None:
        held = self.pick(which)
        if from_tiles and held.states:
            in_tiles = int(held.states[0].lengths[0, formats.QUANTIZED])
            depth += held.length - held.rows[0].start - SINKS - in_tiles if in_tiles else 0
        depth = min(depth, held.length)
        length = held.length - depth
        held.settle()
        with self.cutting():
            held.cache.crop(length if is_absolute and length else -depth)
        for i, row in enumerate(held.rows):
            quantized = [int(state.lengths[i, formats.QUANTIZED]) for state in held.states]
            assert quantized[0] == quantized[1]
            row.cut(length, quantized[0])

    @rule(which=WHICH)
    def pack(self, which: int) -> None:
        """Pack what is due; else that waits for an attention or for more tokens."""
        held = self.pick(which)
        held.settle()
        for layer in held.cache.layers if held.rows else []:
            with self.appending(held):
                layer.flush()
                due = [
                    formats.quantized_tokens(max(length - start, 0), quantized, **RULE)
                    for start, length, quantized in layer.state.lengths.tolist()
                ]
                layer.state.pack()
            assert layer.state.lengths[:, formats.QUANTIZED].tolist() == due

    @rule(which=WHICH, rows=SELECTION, is_reorder=strategies.booleans())
    def select(self, which: int, rows: list[int], is_reorder: bool) -> None:
        held = self.pick(which)
        if not held.rows:
            return
        rows = [row % len(held.rows) for row in rows]
        held.settle()
        with no_decoding():
            if is_reorder:
                held.cache.reorder_cache(torch.tensor(rows))
            else:
                held.cache.batch_select_indices(torch.tensor(rows))
        held.rows = [copy.deepcopy(held.rows[row]) for row in rows]

    @rule(which=WHICH, repeats=strategies.integers(1, 3))
    def batch_repeat_interleave(self, which: int, repeats: int) -> None:
        held = self.pick(which)
        if len(held.rows) * repeats > MOST_ROWS:
            return
        held.settle()
        with no_decoding():
            held.cache.batch_repeat_interleave(repeats)
        held.rows = [copy.deepcopy(row) for row in held.rows for _ in range(repeats)]

    @rule(which=WHICH)
    def reset(self, which: int) -> None:
        held = self.pick(which)
        if held.length < LONGEST // 2:
            return
        with no_decoding():
            held.cache.reset()
        held.rows, held.waiting = [], 0

    @precondition(lambda self: len(self.held) < MOST_CACHES)
    @rule(which=WHICH)
    def fork(self, which: int) -> None:
        held = self.pick(which)
        with no_decoding():
            self.held.append(held.copy(lambda cache: cache.fork()))
        if "max_cache_len" not in self.options:
            for mine, other in zip(self.held[-1].states, held.states, strict=True):
                assert mine.table.pool is other.table.pool

    @precondition(lambda self: len(self.held) < MOST_CACHES)
    @rule(which=WHICH, is_pickled=strategies.booleans())
    def whole_copy(self, which: int, is_pickled: bool) -> None:
        held = self.pick(which)
        make = (lambda cache: pickle.loads(pickle.dumps(cache))) if is_pickled else copy.deepcopy
        with no_decoding():
            self.held.append(held.copy(make))
        for mine, other in zip(self.held[-1].states, held.states, strict=True):
            assert mine.table.pool is not other.table.pool

    @rule(which=WHICH)
    def drop(self, which: int) -> None:
        del self.held[which % len(self.held)]
        if not self.held:
            self.begin(1, (0,))

    @invariant()
    def check(self) -> None:
        """Check all caches: none may see what another does."""
        for held in self.held:
            self.check_held(held)
        states = [state for held in self.held for state in held.states]
        known = {id(pool) for pool in self.pools}
        pools = {id(state.table.pool): state.table.pool for state in states}
        self.pools += [pool for key, pool in pools.items() if key not in known]
        for pool in self.pools:
            check_pages(pool, [state for state in states if state.table.pool is pool])

    def cutting(self) -> Any:
        """What a block that cuts must not do."""
        return no_decoding()

    @contextlib.contextmanager
    def appending(self, held: Held) -> Iterator[None]:
        """Decode nothing in a block that appends, and write no page that is full or of others."""
        kept = []
        for other in self.held:
            for state in other.states:
                for row, (*_, quantized) in enumerate(state.lengths.tolist()):
                    full = quantized // formats.TILE_TOKENS
                    pages = state.table.rows[row][: full if other is held else None]
                    kept.append((state.table.pool, pages, state.table.pool.tiles[pages]))
        with no_decoding():
            yield
        for pool, pages, records in kept:
            assert torch.equal(pool.tiles[pages], records)


class ShrinkingPools(Caches):
    """Pools give back memory at every chance."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = mock.patch.object(pages, "is_sparse", lambda held, used: held > used)
        self.patch.start()

    def teardown(self) -> None:
        self.patch.stop()


def no_decoding() -> Any:
    """Let decoding be an error in a block."""
    error = AssertionError("codes were decoded")
    return mock.patch.object(torch.ops.kvq, "dequantize_tile", side_effect=error)
