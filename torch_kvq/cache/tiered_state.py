"""Tensors of a tiered layer (docs/formats.md, "State of a tiered layer") and the room they need.

The first `kept` slots of the near buffers hold sinks, chosen tokens and tokens that came back. The
slots behind them hold recent tokens by position: slot ``kept + i`` is position `first` + i of every
row, and empty in rows where that is a token of a tile or padding. So storing a token writes one
slot, and everything else happens once in 64 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_kvq._memory import empty_buffer
from torch_kvq.cache.far import FarTier
from torch_kvq.cache.memory import tensor_bytes
from torch_kvq.cache.near import Near, promoted_masks
from torch_kvq.cache.paged import PagedState, normal_tensors
from torch_kvq.cache.pages import BlockTable
from torch_kvq.cache.room import pages_of
from torch_kvq.cache.tier_options import TierOptions
from torch_kvq.formats import TILE_TOKENS, far_record_bytes

_NEAR = ("near_key", "near_value", "near_index", "near_use", "returned")
_HALVED = 0.6931471805599453
"""What a log weight loses with every tile of a row, so that old use counts half."""


class TieredState(PagedState):
    """State of a tiered layer.

    Args:
        key: any keys ``[batch, kv_heads, tokens, key_dim]``: shape, dtype and device are taken.
        value: values ``[batch, kv_heads, tokens, value_dim]``.
        options: how to store tokens.

    Attributes:
        kept: slots before the recent tokens.
        first: position of the first slot behind them.
        near_use: float32 ``[batch, kv_heads, capacity]``: the greatest log weight of the token in
            each slot, halved with every tile.
        returned: bool ``[batch, kv_heads, capacity]``: the token came back from the archive.
        median_use: float32 ``[batch, kv_heads]``: the median use of the tokens chosen last.
    """

    options: TierOptions
    own_tensors = (*_NEAR, "median_use", "near_count", "promoted", "balance", "lengths")

    @normal_tensors
    def __init__(self, key: Tensor, value: Tensor, options: TierOptions) -> None:
        record_bytes = far_record_bytes(options.far, key.shape[3], value.shape[3])
        super().__init__(key, value, options, record_bytes)
        batch, kv_heads, _, key_dim = key.shape
        self.far = FarTier(options.far, key_dim, value.shape[3], key.dtype)
        self.kept = self.first = 0
        self.near_count = self.lengths.new_zeros((batch, kv_heads))
        self.median_use = key.new_zeros((batch, kv_heads), dtype=torch.float32)
        self.promoted = key.new_zeros((batch, kv_heads, 0), dtype=torch.int64)
        channels = key_dim if options.far == "tile4" else 0
        self.balance = key.new_zeros((batch, kv_heads, channels), dtype=torch.float32)
        self.near_key, self.near_value, self.near_index, self.near_use, self.returned = (
            self._empty_near(0, key, value)
        )

    def _empty_near(self, slots: int, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        shape = (self.lengths.shape[0], self.kv_heads, slots)
        return (
            empty_buffer((*shape, self.key_dim), key),
            empty_buffer((*shape, self.value_dim), value),
            self.lengths.new_full(shape, -1),
            key.new_full(shape, -torch.inf, dtype=torch.float32),
            key.new_zeros(shape, dtype=torch.bool),
        )

    @property
    def exact(self) -> tuple[Tensor, Tensor]:
        """Near keys and values."""
        return self.near_key, self.near_value

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Arguments of the operator, looked up anew each time as forks share a pool."""
        return (
            self.near_key,
            self.near_value,
            self.near_index,
            self.near_count,
            self.table.pool.tiles,
            self.table.tensor,
            self.promoted,
            self.lengths,
        )

    def near(self, row: int) -> Near:
        """The near slots of a row, as views."""
        return Near(*(getattr(self, name)[row] for name in _NEAR))

    def append(self, key: Tensor, value: Tensor) -> None:
        """Append ``[batch, kv_heads, tokens, dim]``; an error leaves the tokens as they were."""
        self._put(key, value)
        if self.length >= self.limit:
            self.pack()

    def append_exact(self, key: Tensor, value: Tensor) -> None:
        """Append with as many more recent tokens exact, so that every query has its window."""
        self._put(key, value)
        self._demote(self.options.residual_length + key.shape[2])

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
        rows, chosen = self._due(tokens)
        self.kept = max((self.options.kept_slots(k) for k in chosen if k is not None), default=0)
        self.first = min((self._recent(start, due) for start, _, due in rows), default=0)
        self.first = min(self.first, tokens)
        recent = tokens - self.first
        self.limit = self._next_limit(rows)
        slots = self.kept + recent + self._spare(recent, tokens)
        self.near_key, self.near_value, self.near_index, self.near_use, self.returned = (
            self._empty_near(slots, key, value)
        )
        ends = slice(self.kept, self.kept + recent)
        self.near_key[:, :, ends] = key[:, :, self.first :]
        self.near_value[:, :, ends] = value[:, :, self.first :]
        if use is not None:
            self.near_use[:, :, ends] = use[:, :, self.first :]
        for row, (start, _, due) in enumerate(rows):
            if not due:
                continue
            end = start + self.options.sink_tokens + due
            prompt = self._candidates(row, key, value, use, start, end)
            self._write_tiles(row, prompt.key, prompt.value, 0, due)
            rank = None if mass is None else mass[row, :, start:end]
            self._choose(row, prompt, chosen[row] or 0, due, rank)
        self.near_count.fill_(self.kept + recent)
        self.lengths[:, 1] = tokens
        self._settle()

    def _candidates(
        self, row: int, key: Tensor, value: Tensor, use: Tensor | None, start: int, end: int
    ) -> Near:
        index = torch.arange(end - start, dtype=torch.int32, device=key.device)
        index = index.expand(self.kv_heads, -1)
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
    def _demote(self, residual_length: int) -> None:
        """Let tokens behind a window become far, and keep the most used near."""
        rows, chosen = self._due(self.length, residual_length)
        most = max((count for count in chosen if count is not None), default=None)
        if most is not None and not self.options.fits(self.kept, most):
            self._fit(0, self.options.kept_slots(most))
        for row, (start, quantized, due) in enumerate(rows):
            if chosen[row] is None:
                continue
            near = self.near(row)
            end = self.kept + start + self.options.sink_tokens + due - self.first
            first = self.kept + self._recent(start, quantized) - self.first
            fresh = end - (due - quantized)
            self._write_tiles(row, near.key[:, fresh:end], near.value[:, fresh:end], quantized, due)
            near.use.sub_(_HALVED)
            self._choose(row, near.slots(first, end), chosen[row] or 0, due)
        self._settle()

    def _due(
        self, length: int, residual_length: int | None = None
    ) -> tuple[list[tuple[int, int, int]], list[int | None]]:
        """Start, far tokens and far tokens to be of each row, and how many of these are near.

        The latter is None for a row that gets no tile.
        """
        rows: list[tuple[int, int, int]] = []
        chosen: list[int | None] = []
        for start, _, quantized in self.lengths.tolist():
            due = self.options.quantized(length - start, quantized, residual_length)
            rows.append((start, quantized, due))
            chosen.append(self.options.chosen(length - start, due) if due > quantized else None)
        return rows, chosen

    def _recent(self, start: int, quantized: int) -> int:
        """Position of the first token of a row that is neither far nor a sink before far ones."""
        return start + (self.options.sink_tokens + quantized if quantized else 0)

    def _write_tiles(self, row: int, key: Tensor, value: Tensor, quantized: int, due: int) -> None:
        """Encode the last ``due - quantized`` of these tokens, ``[kv_heads, tokens, dim]``."""
        fresh = due - quantized
        key, value = key[:, key.shape[1] - fresh :], value[:, value.shape[1] - fresh :]
        if self.balance.shape[2] and not quantized:
            self.balance[row] = self.far.balance(key, self.options)
        records = self.far.encode(key, value, self.balance[row])
        self.table.extend(row, pages_of(due))
        self.table.pool.tiles[self.table.rows[row][pages_of(quantized) : pages_of(due)]] = records
        self._match_promoted()

    def _choose(
        self, row: int, new: Near, chosen: int, due: int, rank: Tensor | None = None
    ) -> None:
        """Let new tokens into the kept slots of a row that has ``due`` far tokens."""
        kept, sinks = self.near(row).slots(0, self.kept), self.options.sink_tokens
        self.median_use[row] = kept.take(new, chosen, sinks, rank)
        self.lengths[row, 2] = due
        self._mark(row, due)

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
        return 0 <= place < quantized and not bool((held == token).any())

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
        """Tokens of one row in order, ``[kv_heads, tokens, dim]``, exact where they are near."""
        start, length, quantized = self.lengths[row].tolist()
        tokens = max(length - start, 0)
        key = self.near_key.new_zeros((self.kv_heads, tokens, self.key_dim))
        value = self.near_value.new_zeros((self.kv_heads, tokens, self.value_dim))
        if quantized:
            pages = self.table.rows[row][: pages_of(quantized)]
            sinks = self.options.sink_tokens
            decoded = self.far.decode(self.table.pool.tiles[pages], self.balance[row])
            for whole, tiles in zip((key, value), decoded, strict=True):
                whole[:, sinks : sinks + quantized] = tiles[:, :quantized]
        near = self.near(row).slots(0, self.kept + self.length - self.first)
        head, slot = (near.token >= 0).nonzero(as_tuple=True)
        token = near.token[head, slot].long()
        key[head, token], value[head, token] = near.key[head, slot], near.value[head, slot]
        return key, value

    def place(self, padding: Tensor | None) -> None:
        """Set the start of the rows without tokens; ``padding`` of the tokens to come is left."""
        super().place(padding)
        self._number()

    def _number(self) -> None:
        """Write which tokens the slots of recent ones hold, or are to hold."""
        start, quantized = self.lengths[:, 0], self.lengths[:, 2]
        slots = self.near_index.shape[2] - self.kept
        position = torch.arange(
            self.first, self.first + slots, dtype=torch.int32, device=self.device
        )
        token = position - start.unsqueeze(1)
        least = torch.where(quantized > 0, quantized + self.options.sink_tokens, 0)
        token = token.masked_fill(token < least.unsqueeze(1), -1)
        self.near_index[:, :, self.kept :] = token.unsqueeze(1)
        self.near_use[:, :, self.kept :].masked_fill_((token < 0).unsqueeze(1), -torch.inf)

    @normal_tensors
    def _settle(self) -> None:
        rows = self.lengths.tolist()
        self._note(rows)
        self.limit = self._next_limit(rows) if self.placed else 0
        self._fit(0)

    def _next_limit(self, rows: Sequence[Sequence[int]]) -> int:
        """Fewest positions at which a row gets another tile."""
        return min(start + self.options.next_tile(used) for start, *_, used in rows)

    def _spare(self, recent: int, length: int) -> int:
        """Slots for tokens to come: until a row gets its next tile, or for a part of the recent."""
        return max(min(self.limit - length, max(recent // 8, TILE_TOKENS)), 0)

    @normal_tensors
    def _fit(self, tokens: int, kept: int = 0) -> None:
        """Give up slots of tokens that are far, and make room for more of both kinds."""
        kept = max(self.kept, kept)
        first = min(self._recent(start, used) for start, _, used in self.lengths.tolist())
        first = max(self.first, min(first, self.length))
        recent = self.length - first + tokens
        held = self.near_key.shape[2] - self.kept
        if kept != self.kept or first != self.first or recent > held:
            self._move(kept, first, self.length, tokens)
        else:
            self._number()

    def _move(self, kept: int, first: int, length: int, tokens: int = 0) -> None:
        """Let there be so many kept slots, and recent ones from ``first`` to ``length`` on."""
        held = self.near_key.shape[2] - self.kept
        recent = length - first + tokens
        slots = recent + self._spare(recent, length + tokens)
        if recent <= held <= slots + TILE_TOKENS:
            slots = held
        shared = max(first, self.first)
        source = slice(
            self.kept + shared - self.first, self.kept + max(length, shared) - self.first
        )
        target = slice(kept + shared - first, kept + max(length, shared) - first)
        old = [getattr(self, name) for name in _NEAR]
        moved = [tensor[:, :, source].clone() for tensor in old]
        if kept != self.kept or slots != held:
            new = self._empty_near(kept + slots, *self.exact)
            for name, tensor, before in zip(_NEAR, new, old, strict=True):
                count = min(kept, self.kept)
                tensor[:, :, :count] = before[:, :, :count]
                setattr(self, name, tensor)
        self.near_use[:, :, kept:] = -torch.inf
        for name, tensor in zip(_NEAR, moved, strict=True):
            getattr(self, name)[:, :, target] = tensor
        self.kept, self.first, self.length = kept, first, length
        self.near_count.fill_(kept + length - first)
        self._number()

    def _with_table(self, table: BlockTable, device: torch.device | str) -> TieredState:
        new = super()._with_table(table, device)
        new._match_promoted()
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let the bits of a copy have as many columns as its table."""
        super().__setstate__(state)
        self._match_promoted()

    def _match_promoted(self) -> None:
        missing = self.table.tensor.shape[1] - self.promoted.shape[2]
        if missing:
            self.promoted = torch.nn.functional.pad(self.promoted, (0, missing))

    def parts(self) -> dict[str, int]:
        """Bytes of all tensors by what they are for."""
        return {
            "near": sum(tensor_bytes(getattr(self, name)) for name in (*_NEAR, "median_use")),
            "far": tensor_bytes(self.table.pool.tiles),
            "balance": tensor_bytes(self.balance),
            "block table": tensor_bytes(self.table.tensor) + tensor_bytes(self.promoted),
            "lengths": tensor_bytes(self.lengths) + tensor_bytes(self.near_count),
        }
