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
from torch_kvq.cache.near import Near
from torch_kvq.cache.paged import PagedState, normal_tensors
from torch_kvq.cache.pages import BlockTable
from torch_kvq.cache.tier_options import TierOptions
from torch_kvq.formats import TILE_TOKENS, far_record_bytes

_NEAR = ("near_key", "near_value", "near_index", "near_use", "returned")


class TieredBuffers(PagedState):
    """Tensors of a tiered layer.

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

    def _recent(self, start: int, quantized: int) -> int:
        """Position of the first token of a row that is neither far nor a sink before far ones."""
        return start + (self.options.sink_tokens + quantized if quantized else 0)

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
        return self.options.spare_slots(recent, self.limit - length)

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

    def _with_table(self, table: BlockTable, device: torch.device | str) -> TieredBuffers:
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
