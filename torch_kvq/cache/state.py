"""Tensors of a layer (docs/formats.md, "State of a layer") and the room they need.

Nothing here reads a key or a code: rows are appended by one operator, and everything else edits
lengths and tables or copies whole buffers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from torch_kvq._memory import empty_buffer
from torch_kvq.cache.options import LayerOptions
from torch_kvq.cache.pages import BlockTable, PagePool
from torch_kvq.cache.room import SLICE, pages_behind_window, pages_of
from torch_kvq.formats import TILE_TOKENS, TileFormat

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S", bound="LayerState")

quantize_tile_ = torch.ops.kvq.quantize_tile_.default

_OWN_TENSORS = ("balance", "exact_key", "exact_value", "lengths")
"""What a state shares with no other."""


def normal_tensors(
    method: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R]:
    """Let tensors that a method makes under inference mode be written outside of it."""

    @functools.wraps(method)
    def wrapped(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
            return method(self, *args, **kwargs)
        with torch.inference_mode(False):
            return method(self, *args, **kwargs)

    return wrapped


class LayerState:
    """State of a layer that grows.

    ``lengths`` is advanced by the operator and is the only truth; ``length`` mirrors its second
    column and ``limit`` is the length at which anything but the operator has to run again. Pages
    may be shared with forks; all other tensors are the state's own.

    Args:
        key: any keys ``[batch, kv_heads, tokens, key_dim]``: shape, dtype and device are taken.
        value: values ``[batch, kv_heads, tokens, value_dim]``.
        options: how to store tokens.

    Attributes:
        length: positions seen, left padding included.
        is_empty: no position was seen yet.
        placed: every row has its first token, so its left padding is known.
        first_position: positions before this one may be given up; 0 without a sliding window.
    """

    @normal_tensors
    def __init__(self, key: Tensor, value: Tensor, options: LayerOptions) -> None:
        batch, kv_heads, _, key_dim = key.shape
        self.options = options
        self.layout = TileFormat(
            key_dim, value.shape[3], options.key_bits, options.value_bits, key.element_size()
        )
        pool = PagePool(kv_heads, self.layout.record_bytes, key.device)
        self.table = BlockTable(pool, batch, self._table_width(), key.device)
        self.balance = key.new_zeros((batch, kv_heads, key_dim), dtype=torch.float32)
        slots = self._first_slots()
        self.exact_key = empty_buffer((batch, kv_heads, slots, key_dim), key)
        self.exact_value = empty_buffer((batch, kv_heads, slots, value.shape[3]), value)
        self.lengths = torch.zeros((batch, 3), dtype=torch.int32, device=key.device)
        self._rule = self._rule_with(options.residual_length)
        self.length = self.limit = self.first_position = 0
        self.is_empty, self.placed = True, False

    def _table_width(self) -> int | None:
        return None

    def _first_slots(self) -> int:
        return 0

    def _rule_with(self, residual_length: int) -> tuple[int, int, int, int, int]:
        options = self.options
        return (
            options.key_bits,
            options.value_bits,
            options.sink_tokens,
            residual_length,
            options.quantized_start,
        )

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Tiles, block_table, balance, exact_key, exact_value, lengths.

        Looked up anew each time: a fork that lets the pool grow replaces the tiles of all.
        """
        table = self.table
        return (
            table.pool.tiles,
            table.tensor,
            self.balance,
            self.exact_key,
            self.exact_value,
            self.lengths,
        )

    @property
    def device(self) -> torch.device:
        """Where all tensors are."""
        return self.lengths.device

    @property
    def batch_size(self) -> int:
        """Number of rows."""
        return self.lengths.shape[0]

    @property
    def slots(self) -> int:
        """Tokens that a row of the exact buffers holds."""
        return self.exact_key.shape[2]

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

    def knows_padding(self, tokens: int) -> bool:
        """Whether so many tokens can be stored without a look at their mask."""
        return self.placed

    def check_room(self, tokens: int) -> None:
        """Raise IndexError when ``tokens`` more positions cannot be held."""

    def append(self, key: Tensor, value: Tensor) -> None:
        """Append ``[batch, kv_heads, tokens, dim]``; an error leaves the tokens as they were."""
        tokens = key.shape[2]
        if tokens > SLICE and self.options.sliding_window is not None:
            for slices in zip(key.split(SLICE, 2), value.split(SLICE, 2), strict=True):
                self.append(*slices)
            return
        length = self.length + tokens
        if length >= self.limit:
            self._reserve(tokens)
        quantize_tile_(*self.tensors, key, value, *self._rule)
        self.length = length
        if length >= self.limit:
            self._settle()
            self._free_pages()

    def append_exact(self, key: Tensor, value: Tensor) -> None:
        """Append with as many more recent tokens exact, so that every query has its window."""
        residual_length = self.options.residual_length + key.shape[2]
        self._reserve(key.shape[2], residual_length)
        quantize_tile_(*self.tensors, key, value, *self._rule_with(residual_length))
        self._settle()

    def pack(self) -> None:
        """Pack the tokens that are due."""
        self.append(self.exact_key[:, :, :0], self.exact_value[:, :, :0])

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
    def crop(self, length: int) -> None:
        """Keep the first ``length`` positions."""
        rows = []
        for start, _, quantized in self.lengths.tolist():
            start = min(start, length)
            behind_sinks = max(length - start - self.options.sink_tokens, 0)
            rows.append((start, length, min(quantized, behind_sinks)))
        self.lengths.copy_(self.lengths.new_tensor(rows))
        self.table.truncate([pages_of(quantized) for *_, quantized in rows])
        self.table.pool.shrink()
        self._settle()

    @normal_tensors
    def select(self, indices: list[int]) -> None:
        """Let row i become what row ``indices[i]`` is."""
        self.table.select(indices, self._page_counts())
        self.table.pool.shrink()
        self.balance, self.exact_key, self.exact_value, self.lengths = (
            self._replace(old, old[indices])
            for old in (self.balance, self.exact_key, self.exact_value, self.lengths)
        )
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
        for name in _OWN_TENSORS:
            setattr(new, name, getattr(self, name).to(device, copy=True))
        return new

    @normal_tensors
    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let a copy that was made under inference mode be written outside of it."""
        self.__dict__.update(state)
        for name in _OWN_TENSORS:
            if (tensor := getattr(self, name)).is_inference():
                setattr(self, name, tensor.clone())

    @normal_tensors
    def _reserve(self, tokens: int, residual_length: int | None = None) -> None:
        """Make room for ``tokens`` more positions, and own the pages they will be written to."""
        slots, most = 0, self.options.window_slots
        for row, (start, length, quantized) in enumerate(self.lengths.tolist()):
            held = max(length + tokens - start, 0)
            due = self.options.quantized(held, quantized, residual_length)
            slots = max(slots, held - due)
            if due > quantized:
                self.table.extend(row, pages_of(due))
                self._own_partial(row, quantized)
            elif due == 0:
                most = self.options.exact_slots
        if slots > self.slots:
            self._resize_exact(max(slots, min(slots + max(slots // 8, TILE_TOKENS), most)))

    def _own_partial(self, row: int, quantized: int) -> None:
        """Only a last page that a cut left partial is ever written again."""
        if quantized % TILE_TOKENS:
            self.table.own(row, quantized // TILE_TOKENS)

    @normal_tensors
    def _settle(self) -> None:
        """Bring the mirrors up to date with ``lengths`` and give back what is not needed."""
        rows = self.lengths.tolist()
        self._note(rows)
        window = self.options.window_slots
        if self.slots > window and all(
            quantized and length - start - quantized <= window for start, length, quantized in rows
        ):
            self._resize_exact(window)
        self.limit = 0
        if self.placed:
            self.limit = min(
                start + min(self.options.next_tile(quantized), quantized + self.slots + 1)
                for start, _, quantized in rows
            )

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

    def _resize_exact(self, slots: int) -> None:
        self.exact_key = _resized(self.exact_key, slots)
        self.exact_value = _resized(self.exact_value, slots)


def _resized(old: Tensor, slots: int) -> Tensor:
    """The first ``slots`` tokens of an exact buffer in a buffer of that size."""
    new = empty_buffer((*old.shape[:2], slots, old.shape[3]), old)
    kept = min(slots, old.shape[2])
    new[:, :, :kept].copy_(old[:, :, :kept])
    return new
