"""Pages of a layer: who owns which, and room for more. Records are moved, never read."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_kvq._memory import empty_buffer
from torch_kvq.cache.room import grown, is_sparse, widened

FREED = -1
"""Stands for a page that a row has given up, in its place among the others."""


class PagePool:
    """Pages that rows, of one table or of several, share by reference count.

    A full page is never written again, so any number of rows may refer to it. Tables that share a
    pool are to be used by one thread at a time.

    Attributes:
        tiles: uint8 ``[pages, kv_heads, record_bytes]``; replaced when the pool grows.

    Example:
        >>> pool = PagePool(kv_heads=2, record_bytes=8640)
        >>> pages = pool.allocate(3)
        >>> pool.retain(pages[:1])
        >>> pool.release(pages)
        >>> pool.used
        1
    """

    def __init__(
        self, kv_heads: int, record_bytes: int, device: torch.device | str | None = None
    ) -> None:
        self.tiles = torch.empty((0, kv_heads, record_bytes), dtype=torch.uint8, device=device)
        self._counts: list[int] = []
        self._free: list[int] = []
        self._tables: weakref.WeakSet[BlockTable] = weakref.WeakSet()

    @property
    def used(self) -> int:
        """Pages with an owner."""
        return len(self._counts) - len(self._free)

    def reserve(self, count: int) -> None:
        """Let ``count`` pages be free, growing the pool when it has too few."""
        missing = count - len(self._free)
        if missing <= 0:
            return
        held = len(self._counts)
        end = grown(held, missing)
        tiles = empty_buffer((end, *self.tiles.shape[1:]), self.tiles)
        tiles[:held].copy_(self.tiles)
        self.tiles = tiles
        self._counts += [0] * (end - held)
        # Last in, first out: the next page taken is the lowest of the new ones.
        self._free[:0] = reversed(range(held, end))

    def shrink(self) -> None:
        """Give memory back when most pages have no owner; the others are numbered anew.

        Pages of tables that have them at all times keep their places.
        """
        held = len(self._counts)
        if not is_sparse(held, self.used) or any(table.width is not None for table in self._tables):
            return
        pages = [page for page, count in enumerate(self._counts) if count]
        tiles = empty_buffer((len(pages), *self.tiles.shape[1:]), self.tiles)
        self.tiles = tiles.copy_(self.tiles[pages])
        self._counts = [self._counts[page] for page in pages]
        self._free = []
        place = {FREED: FREED, **{page: index for index, page in enumerate(pages)}}
        for table in self._tables:
            table.renumber(place)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages."""
        self.reserve(count)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._counts[page] = 1
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add an owner to each page."""
        for page in pages:
            if page != FREED:
                self._counts[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Take an owner from each page; one without owners is free again."""
        for page in pages:
            if page == FREED:
                continue
            self._counts[page] -= 1
            if not self._counts[page]:
                self._free.append(page)

    def is_shared(self, page: int) -> bool:
        """Whether more than one row refers to the page."""
        return self._counts[page] > 1

    def copy(self, page: int) -> int:
        """A new page with the same records."""
        (new,) = self.allocate(1)
        self.tiles[new].copy_(self.tiles[page])
        return new


class BlockTable:
    """The pages of every row, in order, and the same as a tensor for the operators.

    A table gives its pages back when it is deleted. Copied or pickled it takes the records of its
    own rows along, in a pool of their own, and nothing of the tables it shares its pool with.

    Args:
        pool: where the pages come from.
        batch: number of rows.
        width: pages that every row has at all times; rows grow one by one when None.
        device: device of the tensor.

    Attributes:
        tensor: int32 ``[batch, max_pages]``; replaced when the table grows.
        rows: the pages of each row.

    Example:
        >>> table = BlockTable(PagePool(1, 64), batch=2)
        >>> table.extend(0, 2)
        >>> table.rows
        [[0, 1], []]
    """

    def __init__(
        self,
        pool: PagePool,
        batch: int,
        width: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.pool = pool
        self.width = width
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.tensor = torch.zeros((batch, width or 0), dtype=torch.int32, device=device)
        pool._tables.add(self)
        self._fill()

    @classmethod
    def from_records(
        cls, records: Tensor, rows: list[list[int]], width: int | None = None
    ) -> BlockTable:
        """A table with a pool of its own.

        Args:
            records: uint8 ``[pages, kv_heads, record_bytes]``.
            rows: which of these each row has, in order.
            width: as in the class.

        Example:
            >>> records = torch.zeros(2, 1, 64, dtype=torch.uint8)
            >>> BlockTable.from_records(records, [[1], [0, 1]]).tensor
            tensor([[1, 0],
                    [0, 1]], dtype=torch.int32)
        """
        pages, kv_heads, record_bytes = records.shape
        with torch.inference_mode(False):
            pool = PagePool(kv_heads, record_bytes, records.device)
            owned = pool.allocate(pages)
            pool.tiles.copy_(records)
            table = cls(pool, len(rows), device=records.device)
            table._widen(max(map(len, rows), default=0))
            for row, held in enumerate(rows):
                table._take(row, held)
            pool.release(owned)
            if width is not None:
                table.resize(width)
        return table

    def to(self, device: torch.device | str) -> BlockTable:
        """The same table on a device, with a pool of its own."""
        records, rows = self._records()
        return self.from_records(records.to(device), rows, self.width)

    def fork(self, counts: list[int]) -> BlockTable:
        """Another table of the pool, with the first ``counts[row]`` pages of every row.

        Example:
            >>> table = BlockTable(PagePool(1, 64), batch=1)
            >>> table.extend(0, 2)
            >>> fork = table.fork([1])
            >>> fork.rows, table.pool.is_shared(0), table.pool.is_shared(1)
            ([[0]], True, False)
        """
        fork = BlockTable(self.pool, len(self.rows), device=self.tensor.device)
        fork._widen(max(counts, default=0))
        for row, count in enumerate(counts):
            fork._take(row, self.rows[row][:count])
        return fork

    def extend(self, row: int, count: int, freed: int = 0) -> None:
        """Let a row have at least ``count`` pages, of which it has given up the first ``freed``.

        Example:
            >>> table = BlockTable(PagePool(1, 64), batch=1)
            >>> table.extend(0, 3, freed=2)
            >>> table.rows, table.pool.used
            ([[-1, -1, 0]], 1)
        """
        self.free(row, freed)
        pages = self.rows[row]
        held = len(pages)
        if count <= held:
            return
        pages += [FREED] * (freed - held)
        pages += self.pool.allocate(count - len(pages))
        if count > self.tensor.shape[1]:
            self._widen(widened(count))
        self._write(row, held)

    def own(self, row: int, index: int) -> None:
        """Give a row its own copy of a page that it is about to write, if others share it."""
        page = self.rows[row][index]
        if self.pool.is_shared(page):
            self.rows[row][index] = self.pool.copy(page)
            self.pool.release([page])
            self._write(row, index)

    def free(self, row: int, count: int) -> None:
        """Give up the first ``count`` pages of a row, which nothing may read again.

        Example:
            >>> table = BlockTable(PagePool(1, 64), batch=1)
            >>> table.extend(0, 3)
            >>> table.free(0, 2)
            >>> table.rows, table.pool.used
            ([[-1, -1, 2]], 1)
        """
        pages = self.rows[row]
        self.pool.release(pages[:count])
        pages[:count] = [FREED] * min(count, len(pages))

    def truncate(self, counts: list[int]) -> None:
        """Keep the first ``counts[row]`` pages of every row."""
        for pages, count in zip(self.rows, counts, strict=True):
            self.pool.release(pages[count:])
            del pages[count:]
        self._fill()

    def select(self, indices: list[int], counts: list[int]) -> None:
        """Let row i refer to the first ``counts[indices[i]]`` pages of row ``indices[i]``."""
        old = self.rows
        kept = {row for row, index in enumerate(indices) if row == index}
        self.rows = [
            old[index] if row in kept else old[index][: counts[index]]
            for row, index in enumerate(indices)
        ]
        for row, pages in enumerate(self.rows):
            if row not in kept:
                self.pool.retain(pages)
        for row, pages in enumerate(old):
            if row not in kept:
                self.pool.release(pages)
        selected = self.tensor[indices]
        if selected.shape == self.tensor.shape:
            self.tensor.copy_(selected)
        else:
            self.tensor = selected
        self._fill()

    def resize(self, width: int) -> None:
        """Give every row ``width`` pages, at least as many as it has."""
        self.width = width
        self._widen(width)
        self._fill()

    def renumber(self, place: Mapping[int, int]) -> None:
        """Take the new numbers of all pages."""
        for row, pages in enumerate(self.rows):
            pages[:] = [place[page] for page in pages]
            self._write(row, 0)

    def _fill(self) -> None:
        if self.width is None:
            return
        self.pool.reserve(sum(self.width - len(pages) for pages in self.rows))
        for row in range(len(self.rows)):
            self.extend(row, self.width)

    def _widen(self, width: int) -> None:
        self.tensor = torch.nn.functional.pad(self.tensor, (0, width - self.tensor.shape[1]))

    def _write(self, row: int, first: int) -> None:
        pages = self.rows[row][first:]
        # The operators read no record of a page that was given up, but its number has to be one.
        numbers = self.tensor.new_tensor([max(page, 0) for page in pages])
        self.tensor[row, first : first + len(pages)] = numbers

    def _take(self, row: int, pages: list[int]) -> None:
        """Let a row without pages refer to these, too."""
        self.pool.retain(pages)
        self.rows[row] = list(pages)
        self._write(row, 0)

    def _records(self) -> tuple[Tensor, list[list[int]]]:
        """The records of all rows, each once, and which of these each row has."""
        held = {page for row in self.rows for page in row if page != FREED}
        pages = sorted(held)
        place = {FREED: FREED, **{page: index for index, page in enumerate(pages)}}
        return self.pool.tiles[pages], [[place[page] for page in row] for row in self.rows]

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockTable:
        return self.to(self.tensor.device)

    def __reduce__(self) -> tuple[Callable[..., BlockTable], tuple[Any, ...]]:
        return BlockTable.from_records, (*self._records(), self.width)

    def __del__(self) -> None:
        # Compiling leaves objects behind that were never filled.
        for pages in vars(self).get("rows", ()):
            self.pool.release(pages)
