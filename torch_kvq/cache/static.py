"""State of a layer that is allocated at once."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_kvq.cache.paged import normal_tensors
from torch_kvq.cache.pages import BlockTable
from torch_kvq.cache.room import pages_of
from torch_kvq.cache.state import LayerState, quantize_tile_
from torch_kvq.formats import TILE_TOKENS

# An operator, because inductor 2.13 may otherwise read lengths after they were advanced.
_library = torch.library.Library("kvq", "FRAGMENT")
_library.define("_length(Tensor lengths) -> Tensor")
_library.impl("_length", lambda lengths: lengths[0, 1].clone(), "CompositeExplicitAutograd")
torch.library.register_fake("kvq::_length", lambda lengths: lengths.new_empty(()), lib=_library)


class StaticState(LayerState):
    """State of a layer that is allocated at once.

    Lengths are read from the tensor only outside of compiled graphs and no attribute changes from
    one step to the next, so that one graph serves every step; tensors keep their addresses.
    """

    def _table_width(self) -> int:
        return pages_of(self.options.quantized(self._capacity, 0))

    def _first_slots(self) -> int:
        return min(self._capacity, self.options.exact_slots)

    @property
    def _capacity(self) -> int:
        if self.options.max_cache_len is None:
            raise ValueError("max_cache_len must be given for a static layer, got None")
        return self.options.max_cache_len

    @property
    def positions(self) -> int:
        """Positions seen, read from the tensor."""
        return int(self.lengths[0, 1])

    @property
    def length_tensor(self) -> Tensor:
        """Positions seen, as a tensor without dimensions that is not read."""
        if torch.compiler.is_compiling():
            length: Tensor = torch.ops.kvq._length.default(self.lengths)
            return length
        return self.lengths[0, 1]

    @property
    def columns_before(self) -> int | Tensor:
        """Columns of an attention mask before those of the next tokens."""
        return 0 if self.is_empty else self.length_tensor

    @property
    def visible_length(self) -> int:
        """Columns of an attention mask: one for every position that there is room for."""
        return self._capacity

    def knows_padding(self, key: Tensor) -> bool:
        """Whether new keys can be stored without a look at their mask.

        A graph does not know whether every row has its first token. It looks whenever tokens come
        as a chunk, and takes a single one to follow others.
        """
        if torch.compiler.is_compiling():
            return key.shape[2] == 1 and not self.is_empty
        return self.placed

    def check_room(self, tokens: int) -> None:
        """Raise IndexError when ``tokens`` more positions exceed ``max_cache_len``."""
        if torch.compiler.is_compiling():
            return
        length = self.positions + tokens
        if length > self._capacity:
            raise IndexError(f"max_cache_len={self._capacity} is too small for {length} positions")

    def append(self, key: Tensor, value: Tensor) -> None:
        """Append ``[batch, kv_heads, tokens, dim]``; IndexError when they do not fit."""
        self._append(key, value, self.options.residual_length)

    def append_exact(self, key: Tensor, value: Tensor) -> None:
        """Append, but pack no more than the room for exact tokens asks for."""
        most = self.slots - self.options.sink_tokens - (TILE_TOKENS - 1)
        residual_length = self.options.residual_length
        self._append(key, value, max(residual_length, min(residual_length + key.shape[2], most)))

    def _append(self, key: Tensor, value: Tensor, residual_length: int) -> None:
        self.check_room(key.shape[2])
        quantize_tile_(*self.tensors, key, value, *self._rule_with(residual_length))
        if torch.compiler.is_compiling():
            if self.is_empty:
                self.is_empty = False
        elif not self.placed or self.is_empty:
            self._settle()

    @normal_tensors
    def resize(self, max_cache_len: int) -> None:
        """Make room for ``max_cache_len`` positions; nothing becomes smaller."""
        self.options = self.options.with_max_cache_len(max_cache_len)
        self.table.resize(max(self._table_width(), self.table.tensor.shape[1]))
        self._resize_exact(max(self._first_slots(), self.slots))

    def _fork_table(self) -> BlockTable:
        """Pages of its own: a shared pool would have to grow, and tiles keep their address."""
        return self.table.to(self.device)

    def _replace(self, old: Tensor, new: Tensor) -> Tensor:
        return old.copy_(new) if old.shape == new.shape else new

    def _settle(self) -> None:
        rows = self.lengths.tolist()
        self._note(rows)
        for row, (_, _, quantized) in enumerate(rows):
            self._own_partial(row, quantized)
