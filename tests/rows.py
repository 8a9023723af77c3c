"""Rows of plain token numbers: what a cache must hold after any sequence of operations."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_kvq import KVQLayer, formats
from torch_kvq.cache import exact
from torch_kvq.cache.pages import PagePool

RULE = {"sink_tokens": 4, "residual_length": 10, "quantized_start": 80}
SINKS = RULE["sink_tokens"]
BALANCE_TOKENS = formats.balance_tokens(SINKS, RULE["quantized_start"])
BITS = (16, 4)
HEADS, DIM = 2, 32
TOKENS = 4096

ERROR = 0.1
"""Of what a row has decoded at 4 bits, as a part of the distance from the mean of all tokens."""


@functools.cache
def vocabulary() -> Tensor:
    """Keys and values of all tokens in two layers, ``[2, layers, TOKENS, kv_heads, dim]``."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randn(2, len(BITS), TOKENS, HEADS, DIM, generator=generator)
    spread, offset = torch.randn(2, len(BITS), 1, HEADS, DIM, generator=generator)
    words[0] = words[0] * (spread.abs() + 0.3) + 2 * offset
    return words


@functools.cache
def _means(layer: int) -> Tensor:
    return vocabulary()[:, layer].mean(1).unsqueeze(2)


def tokens_of(ids: list[list[int]], layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of rows of tokens, ``[rows, kv_heads, tokens, dim]`` each."""
    key, value = vocabulary()[:, layer, torch.tensor(ids).long()].transpose(2, 3)
    return key, value


@functools.lru_cache(maxsize=256)
def fresh_tiles(ids: tuple[int, ...]) -> Tensor:
    """All full tiles of a fresh layer that was fed these tokens, and more so that it packs them."""
    layer = KVQLayer(4, **RULE)
    layer.update(*tokens_of([[*ids, *range(TOKENS - 96, TOKENS)]], BITS.index(4)))
    layer.flush()
    assert layer.state is not None
    count = max(len(ids) - SINKS, 0) // formats.TILE_TOKENS
    return layer.state.table.pool.tiles[layer.state.table.rows[0][:count]]


@dataclass
class Row:
    """What a row holds.

    Attributes:
        ids: the token of every position, padding included.
        start: left padding.
        stale_tiles: tiles that a cut has left partial: their means are those of lost tokens.
        stale_balance: a cut has taken keys that the balance of the row was computed from.
    """

    ids: list[int] = field(default_factory=list)
    start: int = 0
    stale_tiles: set[int] = field(default_factory=set)
    stale_balance: bool = False

    def cut(self, length: int, quantized: int) -> None:
        """Keep the first positions, ``quantized`` of them in tiles."""
        del self.ids[length:]
        self.start = min(self.start, length)
        full, rest = divmod(quantized, formats.TILE_TOKENS)
        self.stale_tiles = {tile for tile in self.stale_tiles if tile < full}
        if rest:
            self.stale_tiles.add(full)
        cuts_balance = length - self.start - SINKS < BALANCE_TOKENS
        self.stale_balance = quantized > 0 and (self.stale_balance or cuts_balance)


@dataclass
class Held:
    """A cache of a layer at 16 bits and one at 4, and what both hold.

    Attributes:
        waiting: how many last positions wait for their attention, which shows the padding.
    """

    cache: Any
    rows: list[Row] = field(default_factory=list)
    waiting: int = 0

    @property
    def length(self) -> int:
        """Positions of every row."""
        return len(self.rows[0].ids) if self.rows else 0

    @property
    def stored(self) -> int:
        """Positions that do not wait."""
        return self.length - self.waiting

    @property
    def states(self) -> list[Any]:
        """The states of the layers that have allocated."""
        return [layer.state for layer in self.cache.layers if layer.state is not None]

    def settle(self, padding: list[int] | None = None) -> None:
        """Store what waits, with so much padding in the rows that have no token before it."""
        for i, row in enumerate(self.rows):
            if self.waiting and row.start >= self.stored:
                row.start = self.stored + (0 if padding is None else padding[i])
        self.waiting = 0

    def copy(self, make: Callable[[Any], Any]) -> Held:
        """Another cache with the same tokens."""
        return Held(make(self.cache), copy.deepcopy(self.rows), self.waiting)


def check_lengths(held: Held) -> None:
    """A cache has the lengths that its rows say."""
    assert int(held.cache.get_seq_length()) == held.length
    for layer in held.cache.layers:
        assert layer.materialized == 0
        if not held.rows:
            assert layer.is_empty
            continue
        assert layer.tokens == sum(held.length - row.start for row in held.rows)
        lengths = layer.state.lengths.tolist()
        assert [row[:2] for row in lengths] == [[row.start, held.stored] for row in held.rows]


def check_tokens(held: Held) -> None:
    """A cache holds what its rows say."""
    check_lengths(held)
    for index, layer in enumerate(held.cache.layers):
        for i, row in enumerate(held.rows):
            ids = row.ids[row.start : held.stored]
            whole = tokens_of([ids], index)
            _check_exact_tokens(layer.state, i, whole)
            _check_decoded(layer.state, i, whole, index)
            if BITS[index] == 4 and not row.stale_balance:
                _check_codes(layer.state, i, ids, row.stale_tiles)


def _check_exact_tokens(state: Any, i: int, whole: tuple[Tensor, Tensor]) -> None:
    """Tokens that are not in tiles are as they came."""
    behind = SINKS + int(state.lengths[i, formats.QUANTIZED])
    for held, want in zip((state.exact_key[i], state.exact_value[i]), whole, strict=True):
        tokens = torch.cat((want[0, :, :SINKS], want[0, :, behind:]), 1)
        assert torch.equal(held[:, : tokens.shape[1]], tokens)


def _check_decoded(state: Any, i: int, whole: tuple[Tensor, Tensor], index: int) -> None:
    """Tokens in tiles are as they came at 16 bits and near it at 4, cut or not."""
    quantized = int(state.lengths[i, formats.QUANTIZED])
    if not quantized:
        return
    decoded = exact._decode_row(state, i, quantized)
    for held, want, mean in zip(decoded, whole, _means(index), strict=True):
        held, tokens = (x[:, SINKS : SINKS + quantized] for x in (held, want[0]))
        if state.layout.is_pass_through:
            assert torch.equal(held, tokens)
        else:
            assert (held - tokens).norm() < ERROR * (tokens - mean).norm()


def _check_codes(state: Any, i: int, ids: list[int], stale_tiles: set[int]) -> None:
    """Full tiles are those of a fresh layer, but for those that a cut once left partial."""
    full = int(state.lengths[i, formats.QUANTIZED]) // formats.TILE_TOKENS
    for tile in sorted(set(range(full)) - stale_tiles):
        page = state.table.rows[i][tile]
        assert torch.equal(state.table.pool.tiles[page], fresh_tiles(tuple(ids))[tile])


def check_pages(pool: PagePool, states: list[Any]) -> None:
    """Every page has as many owners as the tables of these states name it.

    A row that grows has the pages it needs and no other; those that a static row has yet to fill
    are its own.
    """
    counts = [0] * pool.tiles.shape[0]
    for state in states:
        table = state.table
        for row, (*_, quantized) in enumerate(state.lengths.tolist()):
            pages = table.rows[row]
            assert table.tensor[row, : len(pages)].tolist() == pages
            assert len(pages) == (table.width or -(-quantized // formats.TILE_TOKENS))
            if table.width:
                assert not any(map(pool.is_shared, pages[quantized // formats.TILE_TOKENS :]))
            for page in pages:
                counts[page] += 1
    assert pool._counts == counts
    assert sorted(pool._free) == [page for page, count in enumerate(counts) if not count]
    assert pool.used == sum(count > 0 for count in counts)
