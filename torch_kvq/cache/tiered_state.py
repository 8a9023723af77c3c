"""State of a tiered layer: tokens become far, stay near, come back and are cut."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_kvq.cache.near import Near, promoted_masks
from torch_kvq.cache.paged import normal_tensors
from torch_kvq.cache.pages import FREED
from torch_kvq.cache.room import pages_behind_window, pages_of
from torch_kvq.cache.tiered_buffers import TieredBuffers
from torch_kvq.formats import TILE_TOKENS

_HALVED = 0.6931471805599453
"""What a log weight loses with every tile of a row, so that old use counts half."""


class _Place(NamedTuple):
    """Where a row stands, and what becomes of it.

    Attributes:
        start: left padding.
        quantized: far tokens.
        due: far tokens to be.
        freed: those that have left the sliding window, the first of them.
        chosen: how many of the others are near.
    """

    start: int
    quantized: int
    due: int
    freed: int
    chosen: int

    @property
    def grows(self) -> bool:
        """Whether the row gets a tile."""
        return self.due > self.quantized


class TieredState(TieredBuffers):
    """State of a tiered layer, see `TieredBuffers`."""

    def append(self, key: Tensor, value: Tensor) -> None:
        """Append ``[batch, kv_heads, tokens, dim]``; an error leaves the tokens as they were."""
        self._put(key, value)
        if self.length >= self.limit:
            self.pack()

    def append_exact(self, key: Tensor, value: Tensor) -> None:
        """Append with as many more recent tokens exact, so that every query has its window."""
        self._put(key, value)
        self._demote(self.options.residual_length + key.shape[2], frees=False)

    def _put(self, key: Tensor, value: Tensor) -> None:
        """Store tokens behind the recent ones."""
        tokens = key.shape[2]
        held = self.near_key
        # Copying would broadcast or convert what does not fit.
        if key.dtype != held.dtype or key.shape[:2] != held.shape[:2] or key.shape[3] == 1:
            raise ValueError(f"key must be like {held.dtype} {tuple(held.shape)}, got {key.shape}")
        end = self.kept + self.length - self.first + tokens
        if end > self.near_key.shape[2]:
            self._fit(tokens)
            end = self.kept + self.length - self.first + tokens
        self.near_key[:, :, end - tokens : end] = key
        self.near_value[:, :, end - tokens : end] = value
        self.near_count.add_(tokens)
        self.lengths[:, 1].add_(tokens)
        self.length += tokens
        self.is_empty = False

    @normal_tensors
    def append_prompt(
        self, key: Tensor, value: Tensor, mass: Tensor | None = None, use: Tensor | None = None
    ) -> None:
        """Store the first tokens of all rows, the near ones chosen by their attention mass.

        Args:
            key: ``[batch, kv_heads, tokens, key_dim]``.
            value: ``[batch, kv_heads, tokens, value_dim]``.
            mass: float32 ``[batch, kv_heads, tokens]``; None when no query is known.
            use: their greatest log weights in the same shape.
        """
        tokens = key.shape[2]
        rows = self._due(tokens)
        self.kept = max(
            (self.options.kept_slots(row.chosen) for row in rows if row.grows), default=0
        )
        self.first = min((self._recent(row.start, row.due) for row in rows), default=0)
        self.first = min(self.first, tokens)
        recent = tokens - self.first
        self.limit = self._next_limit([(row.start, row.due) for row in rows])
        slots = self.kept + recent + self._spare(recent, tokens)
        self.near_key, self.near_value, self.near_index, self.near_use, self.returned = (
            self._empty_near(slots, key, value)
        )
        ends = slice(self.kept, self.kept + recent)
        self.near_key[:, :, ends] = key[:, :, self.first :]
        self.near_value[:, :, ends] = value[:, :, self.first :]
        if use is not None:
            self.near_use[:, :, ends] = use[:, :, self.first :]
        for row, place in enumerate(rows):
            if not place.due:
                continue
            end = place.start + self.options.sink_tokens + place.due
            prompt = self._candidates(row, key, value, use, place, end)
            self._write_tiles(row, prompt.key, prompt.value, place)
            rank = None if mass is None else mass[row, :, place.start : end]
            self._choose(row, prompt, place, rank)
        self.near_count.fill_(self.kept + recent)
        self.lengths[:, 1] = tokens
        self._free_pages()
        self._settle()

    def _candidates(
        self, row: int, key: Tensor, value: Tensor, use: Tensor | None, place: _Place, end: int
    ) -> Near:
        start = place.start
        index = torch.arange(end - start, dtype=torch.int32, device=key.device)
        index = index.masked_fill(self._is_freed(index, place.freed), -1).expand(self.kv_heads, -1)
        return Near(
            key[row, :, start:end],
            value[row, :, start:end],
            index,
            index.new_zeros(index.shape, dtype=torch.float32)
            if use is None
            else use[row, :, start:end],
            index.new_zeros(index.shape, dtype=torch.bool),
        )

    def pack(self) -> None:
        """Let the tokens that have left the window become far."""
        self._demote(self.options.residual_length)

    @normal_tensors
    def _demote(self, residual_length: int, frees: bool = True) -> None:
        """Let tokens behind a window become far, and keep the most used near.

        Args:
            residual_length: tokens of the window.
            frees: give up what has left the sliding window.
        """
        rows = self._due(self.length, residual_length, frees)
        most = max((place.chosen for place in rows if place.grows), default=None)
        if most is not None and not self.options.fits(self.kept, most):
            self._fit(0, self.options.kept_slots(most))
        for row, place in enumerate(rows):
            near = self.near(row)
            if place.freed:
                near.clear(self._is_freed(near.token, place.freed))
                self._mark(row, place.quantized)
            if not place.grows:
                continue
            end = self.kept + place.start + self.options.sink_tokens + place.due - self.first
            first = self.kept + self._recent(place.start, place.quantized) - self.first
            fresh = end - (place.due - place.quantized)
            self._write_tiles(row, near.key[:, fresh:end], near.value[:, fresh:end], place)
            near.use.sub_(_HALVED)
            self._choose(row, near.slots(first, end), place)
        if frees:
            self._free_pages()
        self._settle()

    def _due(
        self, length: int, residual_length: int | None = None, frees: bool = True
    ) -> list[_Place]:
        """Where the rows stand, and what becomes of them."""
        rows = []
        for row, (start, _, quantized) in enumerate(self.lengths.tolist()):
            tokens = length - start
            due = max(self.options.quantized(tokens, quantized, residual_length), quantized)
            freed = self._freed(row)
            if frees:
                freed = max(freed, pages_behind_window(self.options, tokens, due) * TILE_TOKENS)
            chosen = self.options.chosen(tokens - freed, due - freed)
            rows.append(_Place(start, quantized, due, freed, chosen))
        return rows

    def _freed(self, row: int) -> int:
        """Far tokens of a row that it has given up."""
        return self.table.rows[row].count(FREED) * TILE_TOKENS

    def _is_freed(self, token: Tensor, freed: int) -> Tensor:
        """Which tokens are among so many far ones that were given up."""
        sinks = self.options.sink_tokens
        return (token >= sinks) & (token < sinks + freed)

    def _write_tiles(self, row: int, key: Tensor, value: Tensor, place: _Place) -> None:
        """Encode those of these tokens, ``[kv_heads, tokens, dim]``, that become far.

        They end with the last of them; what has left a sliding window is left out.
        """
        if self.balance.shape[2] and not place.quantized:
            self.balance[row] = self.far.balance(key[:, -place.due :], self.options)
        first = max(place.quantized, place.freed)
        fresh = place.due - first
        key, value = key[:, key.shape[1] - fresh :], value[:, value.shape[1] - fresh :]
        records = self.far.encode(key, value, self.balance[row])
        self.table.extend(row, pages_of(place.due), pages_of(place.freed))
        pages = self.table.rows[row][pages_of(first) : pages_of(place.due)]
        self.table.pool.tiles[pages] = records
        self._match_promoted()

    def _choose(self, row: int, new: Near, place: _Place, rank: Tensor | None = None) -> None:
        """Let new tokens into the kept slots of a row."""
        kept, sinks = self.near(row).slots(0, self.kept), self.options.sink_tokens
        self.median_use[row] = kept.take(new, place.chosen, sinks, rank)
        self.lengths[row, 2] = place.due
        self._mark(row, place.due)

    def _mark(self, row: int, quantized: int) -> None:
        self.promoted[row] = promoted_masks(
            self.near_index[row, :, : self.kept],
            self.options.sink_tokens,
            quantized,
            self.promoted.shape[2],
        )

    def note_use(self, near_score: Tensor) -> None:
        """Remember how much the last queries attended to near tokens, by their log weights."""
        torch.maximum(self.near_use, near_score, out=self.near_use)

    @normal_tensors
    def promote(
        self, row: int, head: int, token: int, key: Tensor, value: Tensor, use: float
    ) -> bool:
        """Let a far token be near, in an empty slot or that of the least used token.

        Args:
            row: of the batch.
            head: of the KV heads.
            token: of the row, its padding not counted.
            key: ``[key_dim]``, exact.
            value: ``[value_dim]``, exact.
            use: log weight of the token.

        Returns:
            False when all slots hold tokens that are used as much.
        """
        near = self.near(row).slots(0, self.kept)
        held, sinks = near.token[head], self.options.sink_tokens
        rank = near.use[head].masked_fill(held < 0, -torch.inf)
        rank = rank.masked_fill((held >= 0) & (held < sinks), torch.inf)
        slot = int(rank.argmin())
        if held[slot] >= 0 and not rank[slot] < use:
            return False
        near.key[head, slot], near.value[head, slot] = key, value
        held[slot], near.use[head, slot], near.returned[head, slot] = token, use, True
        self._mark(row, int(self.lengths[row, 2]))
        return True

    def is_far(self, row: int, head: int, token: int) -> bool:
        """Whether a KV head has a token of a row in the far tier alone."""
        place, quantized = token - self.options.sink_tokens, int(self.lengths[row, 2])
        held = self.near_index[row, head, : self.kept]
        return self._freed(row) <= place < quantized and not bool((held == token).any())

    @normal_tensors
    def crop(self, length: int) -> None:
        """Keep the first ``length`` positions.

        Tiles that are cut come back to the recent tokens, as they were decoded where they are not
        near, so that every tile is full.
        """
        rows, again = [], {}
        for row, (start, _, quantized) in enumerate(self.lengths.tolist()):
            start = min(start, length)
            behind = max(length - start - self.options.sink_tokens, 0)
            whole = min(quantized, behind // TILE_TOKENS * TILE_TOKENS)
            if whole < quantized:
                again[row] = self.decode_row(row)
            rows.append((start, length, whole))
        for row, (_, _, whole) in enumerate(rows):
            if row in again:
                self._drop_kept(row, self.options.sink_tokens + whole if whole else 0)
        self.lengths.copy_(self.lengths.new_tensor(rows))
        self.table.truncate([pages_of(whole) for *_, whole in rows])
        self.table.pool.shrink()
        self._move(self.kept, min(self._recent(start, whole) for start, _, whole in rows), length)
        for row, (key, value) in again.items():
            start, _, whole = rows[row]
            self._put_back(row, key, value, start, self._recent(start, whole) - start)
            self._mark(row, whole)
        self._settle()

    def recent(self, row: int) -> tuple[int, int]:
        """Position of the first recent token of a row, and how many there are."""
        start, length, quantized = self.lengths[row].tolist()
        first = min(self._recent(start, quantized), length)
        return first, length - first

    def put_exact(self, row: int, key: Tensor, value: Tensor, found: Tensor) -> None:
        """Overwrite the recent tokens of a row.

        Args:
            row: of the batch.
            key: ``[kv_heads, tokens, key_dim]``, all of them.
            value: ``[kv_heads, tokens, value_dim]``.
            found: bool ``[kv_heads, tokens]``; the others stay as they are.
        """
        first = self.kept + self.recent(row)[0] - self.first
        for slots, exact in ((self.near_key, key), (self.near_value, value)):
            held = slots[row, :, first : first + found.shape[1]]
            held.copy_(torch.where(found.unsqueeze(2).to(held.device), exact.to(held.device), held))

    def _drop_kept(self, row: int, tokens: int) -> None:
        """Empty the kept slots of tokens from this one on."""
        near = self.near(row).slots(0, self.kept)
        near.clear(near.token >= tokens)

    def _put_back(self, row: int, key: Tensor, value: Tensor, start: int, token: int) -> None:
        """Let the tokens of a row from this one on be recent ones."""
        first = self.kept + start + token - self.first
        end = self.kept + self.length - self.first
        for slots, whole in ((self.near_key, key), (self.near_value, value)):
            slots[row, :, first:end] = whole[:, token : token + end - first]

    def decode(self, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values by position, zero in left padding and behind the last token.

        Returns:
            ``[batch, kv_heads, length, key_dim]`` and ``[batch, kv_heads, length, value_dim]``.
        """
        batch = self.batch_size
        key = self.near_key.new_zeros((batch, self.kv_heads, length, self.key_dim))
        value = self.near_value.new_zeros((batch, self.kv_heads, length, self.value_dim))
        for row, (start, end, _) in enumerate(self.lengths.tolist()):
            tokens = max(min(end, length) - start, 0)
            for out, whole in zip((key, value), self.decode_row(row), strict=True):
                out[row, :, start : start + tokens] = whole[:, :tokens]
        return key, value

    def decode_row(self, row: int) -> tuple[Tensor, Tensor]:
        """Tokens of one row in order, ``[kv_heads, tokens, dim]``, exact where they are near.

        Those that were given up are zero.
        """
        start, length, quantized = self.lengths[row].tolist()
        tokens = max(length - start, 0)
        key = self.near_key.new_zeros((self.kv_heads, tokens, self.key_dim))
        value = self.near_value.new_zeros((self.kv_heads, tokens, self.value_dim))
        if quantized:
            freed, sinks = self._freed(row), self.options.sink_tokens
            pages = self.table.rows[row][pages_of(freed) : pages_of(quantized)]
            decoded = self.far.decode(self.table.pool.tiles[pages], self.balance[row])
            for whole, tiles in zip((key, value), decoded, strict=True):
                whole[:, sinks + freed : sinks + quantized] = tiles
        near = self.near(row).slots(0, self.kept + self.length - self.first)
        head, slot = (near.token >= 0).nonzero(as_tuple=True)
        token = near.token[head, slot].long()
        key[head, token], value[head, token] = near.key[head, slot], near.value[head, slot]
        return key, value
