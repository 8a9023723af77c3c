"""What the states of all packed layers have in common: rows, their lengths and their pages.

Nothing here reads a key or a code.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from torch_kvq.cache.options import RowOptions
from torch_kvq.cache.pages import BlockTable, PagePool
from torch_kvq.cache.room import pages_behind_window, pages_of
from torch_kvq.formats import TILE_TOKENS

_P = ParamSpec("_P")
_R = TypeVar("_R")
_T = TypeVar("_T")
_S = TypeVar("_S", bound="PagedState")


def normal_tensors(
    method: Callable[Concatenate[_T, _P], _R],
) -> Callable[Concatenate[_T, _P], _R]:
    """Let tensors that a method makes under inference mode be written outside of it."""

    @functools.wraps(method)
    def wrapped(self: _T, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return method(self, *args, **kwargs)
        with torch.inference_mode(False):
            return method(self, *args, **kwargs)

    return wrapped


class PagedState:
    """Rows of tokens, of which a part is in pages that rows may share.

    ``lengths`` is the only truth; ``length`` mirrors its second column and ``limit`` is the length
    at which more than storing a token has to be done. Pages may be shared with forks; all other
    tensors are the state's own.

    Args:
        key: any keys ``[batch, kv_heads, tokens, key_dim]``: shape, dtype and device are taken.
        value: values ``[batch, kv_heads, tokens, value_dim]``.
        options: which tokens stay exact.
        record_bytes: bytes of a page for each KV head.

    Attributes:
        length: positions seen, left padding included.
        is_empty: no position was seen yet.
        placed: every row has its first token, so its left padding is known.
        first_position: positions before this one may be given up; 0 without a sliding window.
    """

    own_tensors: ClassVar[tuple[str, ...]] = ("lengths",)
    """Names of the tensors that a state shares with no other; rows are their first dimension."""

    def __init__(self, key: Tensor, value: Tensor, options: RowOptions, record_bytes: int) -> None:
        batch, self.kv_heads, _, self.key_dim = key.shape
        self.value_dim = value.shape[3]
        self.options = options
        pool = PagePool(self.kv_heads, record_bytes, key.device)
        self.table = BlockTable(pool, batch, self._table_width(), key.device)
        self.lengths = torch.zeros((batch, 3), dtype=torch.int32, device=key.device)
        self.length = self.limit = self.first_position = 0
        self.is_empty, self.placed = True, False

    def _table_width(self) -> int | None:
        return None

    @property
    def exact(self) -> tuple[Tensor, Tensor]:
        """Buffers of exact keys and values, ``[batch, kv_heads, slots, dim]``."""
        raise NotImplementedError

    def append(self, key: Tensor, value: Tensor) -> None:
        """Append ``[batch, kv_heads, tokens, dim]``; an error leaves the tokens as they were."""
        raise NotImplementedError

    def append_exact(self, key: Tensor, value: Tensor) -> None:
        """Append with as many more recent tokens exact, so that every query has its window."""
        raise NotImplementedError

    def pack(self) -> None:
        """Pack the tokens that are due."""
        raise NotImplementedError

    def crop(self, length: int) -> None:
        """Keep the first ``length`` positions."""
        raise NotImplementedError

    def parts(self) -> dict[str, int]:
        """Bytes of all tensors by what they are for."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Bring the mirrors up to date with ``lengths`` and give back what is not needed."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.lengths.device

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.lengths.shape[0]

    @property
    def positions(self) -> int:
        """Positions seen, left padding included."""
        return self.length

    @property
    def columns_before(self) -> int | Tensor:
        """Columns of an attention mask before those of the next tokens."""
        return self.length

    @property
    def visible_length(self) -> int:
        """Columns of an attention mask."""
        return self.length

    def knows_padding(self, key: Tensor) -> bool:
        """Whether new keys can be stored without a look at their mask."""
        return self.placed

    def check_room(self, tokens: int) -> None:
        """Raise IndexError when ``tokens`` more positions cannot be held."""

    def place(self, padding: Tensor | None) -> None:
        """Set the start of the rows without tokens.

        Args:
            padding: int ``[batch]``, how many of the tokens to come are left padding; None for
                none.
        """
        start, length = self.lengths[:, 0], self.lengths[:, 1]
        first = length if padding is None else length + padding
        start.copy_(torch.where(start >= length, first, start))

    def check_crop(self, length: int) -> None:
        """Raise IndexError when positions that ``length`` ones need were given up."""
        window = self.options.sliding_window
        if window is not None and self.first_position > max(length - window, 0):
            raise IndexError(
                f"{length} positions are to remain, but of their sliding window of {window} those "
                f"before {self.first_position} were given up"
            )

    def check_queries(self, queries: int) -> None:
        """Raise ValueError when positions that so many queries attend to were given up."""
        window = self.options.sliding_window
        if window is not None and self.first_position > max(self.length - queries - window + 1, 0):
            raise ValueError(
                f"the first of {queries} queries attends to positions that left the sliding window "
                f"of {window}: those before {self.first_position} were given up"
            )

    @normal_tensors
    def select(self, indices: list[int]) -> None:
        """Let row i become what row ``indices[i]`` is."""
        self.table.select(indices, self._page_counts())
        self.table.pool.shrink()
        for name in self.own_tensors:
            old = getattr(self, name)
            setattr(self, name, self._replace(old, old[indices]))
        self._settle()

    def _replace(self, old: Tensor, new: Tensor) -> Tensor:
        return new

    @normal_tensors
    def fork(self: _S) -> _S:
        """Another state with the same tokens, which shares the pages that hold some."""
        return self._with_table(self._fork_table(), self.device)

    @normal_tensors
    def to(self: _S, device: torch.device | str) -> _S:
        """Another state with the same tokens on a device, which shares nothing with this one."""
        return self._with_table(self.table.to(device), device)

    def _fork_table(self) -> BlockTable:
        return self.table.fork(self._page_counts())

    def _page_counts(self) -> list[int]:
        return [pages_of(quantized) for *_, quantized in self.lengths.tolist()]

    def _with_table(self: _S, table: BlockTable, device: torch.device | str) -> _S:
        """A copy of everything but the pages, which are those of ``table``."""
        new = copy.copy(self)
        new.table = table
        for name in self.own_tensors:
            setattr(new, name, getattr(self, name).to(device, copy=True))
        return new

    @normal_tensors
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let a copy that was made under inference mode be written outside of it."""
        self.__dict__.update(state)
        for name in self.own_tensors:
            if (tensor := getattr(self, name)).is_inference():
                setattr(self, name, tensor.clone())

    @normal_tensors
    def _free_pages(self) -> None:
        """Give up pages that have left the sliding window of all queries to come."""
        if self.options.sliding_window is None:
            return
        for row, (start, length, quantized) in enumerate(self.lengths.tolist()):
            count = pages_behind_window(self.options, length - start, quantized)
            if count:
                self.table.free(row, count)
                first = start + self.options.sink_tokens + count * TILE_TOKENS
                self.first_position = max(self.first_position, first)

    def _note(self, rows: list[list[int]]) -> None:
        self.length = rows[0][1]
        self.is_empty = self.length == 0
        self.placed = all(start < length for start, length, _ in rows)
