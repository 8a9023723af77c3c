"""Tensors of a layer that stores its input: pages of packed tokens and an exact tail."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torch_kvq._memory import empty_buffer
from torch_kvq._x_formats import XFormat
from torch_kvq.cache.memory import tensor_bytes
from torch_kvq.cache.paged import normal_tensors
from torch_kvq.cache.pages import BlockTable, PagePool
from torch_kvq.formats import PASS_THROUGH_BITS, TILE_TOKENS

_S = TypeVar("_S", bound="XState")


class Stream(NamedTuple):
    """What is stored of every token: the layer's input, or a part of it.

    Attributes:
        channels: elements of a token, a multiple of 64.
        bits: of an element, 16 for the model's own dtype.
        axis: ``"token"`` or ``"channel"``, along what a scale's group runs.
    """

    channels: int
    bits: int
    axis: str

    def record_bytes(self, itemsize: int) -> int:
        """Bytes of 64 tokens.

        Args:
            itemsize: bytes of an element of the model's dtype.
        """
        if self.bits == PASS_THROUGH_BITS:
            return TILE_TOKENS * self.channels * itemsize
        return XFormat(self.channels, self.bits, self.axis, itemsize).record_bytes


class XState:
    """State of a layer; every row holds the same positions, left padding included.

    Args:
        like: the first tokens: their batch, dtype and device are taken.
        streams: what is stored of a token.

    Attributes:
        streams: as given.
        table: pages of all rows; a page has the records of all streams, one behind another.
        tails: exact tokens behind the packed ones, ``[batch, slots, channels]`` for each stream.
        quantized: tokens in pages, a multiple of 64.
        length: tokens in all.
    """

    @normal_tensors
    def __init__(self, like: Tensor, streams: Sequence[Stream]) -> None:
        self.streams = tuple(streams)
        sizes = [stream.record_bytes(like.element_size()) for stream in streams]
        self._ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
        pool = PagePool(1, sum(sizes), like.device)
        self.table = BlockTable(pool, like.shape[0], device=like.device)
        self.tails = [like.new_empty((like.shape[0], 0, stream.channels)) for stream in streams]
        self.length = self.quantized = 0

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.tails[0].device

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.tails[0].shape[0]

    @property
    def positions(self) -> int:
        """Positions seen, left padding included."""
        return self.length

    @property
    def is_empty(self) -> bool:
        """Whether no position was seen yet."""
        return self.length == 0

    @property
    def recent(self) -> list[Tensor]:
        """The exact tokens of each stream, ``[batch, tokens, channels]``."""
        return [tail[:, : self.length - self.quantized] for tail in self.tails]

    def records(self, stream: int, first: int = 0, last: int | None = None) -> Tensor:
        """Records of the packed tokens ``first`` to ``last``, uint8 ``[batch, pages, bytes]``."""
        last = self.quantized if last is None else last
        pages = self.table.tensor[:, first // TILE_TOKENS : last // TILE_TOKENS]
        begin = self._ends[stream - 1] if stream else 0
        parts = self.table.pool.tiles[:, 0, begin : self._ends[stream]]
        # Rows are copied whole here, while an index would copy byte by byte.
        return parts.index_select(0, pages.flatten()).unflatten(0, pages.shape)

    @normal_tensors
    def append(self, parts: Sequence[Tensor]) -> None:
        """Append exact tokens, ``[batch, tokens, channels]`` for each stream."""
        held = self.length - self.quantized
        needed = held + parts[0].shape[1]
        if needed > self.tails[0].shape[1]:
            slots = max(needed, min(2 * held, held + TILE_TOKENS))
            self._resize_tails(slots)
        for tail, part in zip(self.tails, parts, strict=True):
            tail[:, held:needed].copy_(part)
        self.length += parts[0].shape[1]

    @normal_tensors
    def pack(self, records: Sequence[Tensor], slots: int) -> None:
        """Replace the oldest exact tokens by their records.

        Args:
            records: uint8 ``[batch, pages, bytes]`` for each stream.
            slots: exact tokens to keep room for.
        """
        pages = records[0].shape[1]
        first = self.quantized // TILE_TOKENS
        joined = torch.cat(list(records), -1)
        for row in range(self.batch_size):
            self.table.extend(row, first + pages)
            self.table.pool.tiles[self.table.rows[row][first:], 0] = joined[row]
        kept = [tail[:, pages * TILE_TOKENS :] for tail in self.recent]
        self.quantized += pages * TILE_TOKENS
        held = self.length - self.quantized
        for index, tail in enumerate(kept):
            new = empty_buffer((tail.shape[0], max(slots, held), tail.shape[2]), tail)
            new[:, :held].copy_(tail)
            self.tails[index] = new

    @normal_tensors
    def crop(self, length: int, decoded: Sequence[Tensor] = ()) -> None:
        """Keep the first ``length`` positions.

        Args:
            length: positions to keep.
            decoded: the tokens of the page that is cut, for each stream; they become exact ones.
        """
        if length < self.quantized:
            self.quantized = length // TILE_TOKENS * TILE_TOKENS
            self.table.truncate([self.quantized // TILE_TOKENS] * self.batch_size)
            self.table.pool.shrink()
            self.length = self.quantized
            self.append([part[:, : length - self.quantized] for part in decoded])
        self.length = length

    @normal_tensors
    def select(self, indices: list[int]) -> None:
        """Let row i become what row ``indices[i]`` is."""
        self.table.select(indices, [len(pages) for pages in self.table.rows])
        self.table.pool.shrink()
        self.tails = [tail[indices] for tail in self.tails]

    def check_crop(self, length: int) -> None:
        """Nothing is ever given up."""

    def place(self, padding: Tensor | None) -> None:
        """Left padding is stored like other positions."""

    @normal_tensors
    def fork(self: _S) -> _S:
        """Another state with the same tokens, which shares the pages."""
        new = copy.copy(self)
        new.table = self.table.fork([len(pages) for pages in self.table.rows])
        new.tails = [tail.clone() for tail in self.tails]
        return new

    @normal_tensors
    def to(self: _S, device: torch.device | str) -> _S:
        """Another state with the same tokens on a device."""
        new = copy.copy(self)
        new.table = self.table.to(device)
        new.tails = [tail.to(device, copy=True) for tail in self.tails]
        return new

    def __getstate__(self) -> dict[str, Any]:
        # Copies have no room for tokens to come.
        return self.__dict__ | {"tails": [tail.clone() for tail in self.recent]}

    @normal_tensors
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let a copy that was made under inference mode be written outside of it."""
        self.__dict__.update(state)
        self.tails = [tail.clone() if tail.is_inference() else tail for tail in self.tails]

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for."""
        return {
            "pages": tensor_bytes(self.table.pool.tiles),
            "exact": sum(map(tensor_bytes, self.tails)),
            "block table": tensor_bytes(self.table.tensor),
        }

    def _resize_tails(self, slots: int) -> None:
        held = self.length - self.quantized
        for index, tail in enumerate(self.tails):
            new = empty_buffer((tail.shape[0], slots, tail.shape[2]), tail)
            new[:, :held].copy_(tail[:, :held])
            self.tails[index] = new
