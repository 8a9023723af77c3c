"""Tensors of a layer (docs/formats.md, "State of a layer") and the room they need.

Nothing here reads a key or a code: rows are appended by one operator, and everything else edits
lengths and tables or copies whole buffers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_kvq._memory import empty_buffer
from torch_kvq.cache.memory import tensor_bytes
from torch_kvq.cache.options import LayerOptions
from torch_kvq.cache.paged import PagedState, normal_tensors
from torch_kvq.cache.room import SLICE, pages_of
from torch_kvq.formats import TILE_TOKENS, TileFormat

quantize_tile_ = torch.ops.kvq.quantize_tile_.default


class LayerState(PagedState):
    """State of a layer that grows; ``lengths`` is advanced by the operator.

    Args:
        key: any keys ``[batch, kv_heads, tokens, key_dim]``: shape, dtype and device are taken.
        value: values ``[batch, kv_heads, tokens, value_dim]``.
        options: how to store tokens.
    """

    options: LayerOptions
    own_tensors = ("balance", "exact_key", "exact_value", "lengths")

    @normal_tensors
    def __init__(self, key: Tensor, value: Tensor, options: LayerOptions) -> None:
        batch, kv_heads, _, key_dim = key.shape
        self.layout = TileFormat(
            key_dim, value.shape[3], options.key_bits, options.value_bits, key.element_size()
        )
        super().__init__(key, value, options, self.layout.record_bytes)
        self.balance = key.new_zeros((batch, kv_heads, key_dim), dtype=torch.float32)
        slots = self._first_slots()
        self.exact_key = empty_buffer((batch, kv_heads, slots, key_dim), key)
        self.exact_value = empty_buffer((batch, kv_heads, slots, value.shape[3]), value)
        self._rule = self._rule_with(options.residual_length)

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
    def exact(self) -> tuple[Tensor, Tensor]:
        """Buffers of exact keys and values."""
        return self.exact_key, self.exact_value

    @property
    def slots(self) -> int:
        """Tokens that a row of the exact buffers holds."""
        return self.exact_key.shape[2]

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

    def parts(self) -> dict[str, int]:
        """Bytes of all tensors by what they are for."""
        tiles, block_table, balance, exact_key, exact_value, lengths = map(
            tensor_bytes, self.tensors
        )
        return {
            "tiles": tiles,
            "exact": exact_key + exact_value,
            "balance": balance,
            "block table": block_table,
            "lengths": lengths,
        }

    def pack(self) -> None:
        """Pack the tokens that are due."""
        self.append(self.exact_key[:, :, :0], self.exact_value[:, :, :0])

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

    def _resize_exact(self, slots: int) -> None:
        self.exact_key = _resized(self.exact_key, slots)
        self.exact_value = _resized(self.exact_value, slots)


def _resized(old: Tensor, slots: int) -> Tensor:
    """The first ``slots`` tokens of an exact buffer in a buffer of that size."""
    new = empty_buffer((*old.shape[:2], slots, old.shape[3]), old)
    kept = min(slots, old.shape[2])
    new[:, :, :kept].copy_(old[:, :, :kept])
    return new
