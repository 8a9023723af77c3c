"""The part of a layer that is bookkeeping: sizes, and rows and tokens that come and go."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor

from torch_kvq.cache.memory import tensor_bytes
from torch_kvq.cache.opaque import outside_graphs
from torch_kvq.cache.options import RowOptions
from torch_kvq.cache.paged import PagedState
from torch_kvq.cache.static import StaticState
from torch_kvq.formats import TILE_TOKENS

_L = TypeVar("_L", bound="CacheLayer")

_eager = outside_graphs("what a layer holds is edited outside of compiled graphs")


class CacheLayer:
    """What a cache asks of its layers, with the names that Transformers gives it.

    Attributes:
        options: how tokens are stored.
        state: the tensors, None before the first tokens.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = True

    def __init__(self, options: RowOptions) -> None:
        self.options = options
        self.state: PagedState | None = None
        self._pending: tuple[Tensor, Tensor] | None = None
        self._unpacked = False  # a long update waits for its attention before it is packed
        self._length = 0  # positions of a layer that grows, with those kept back
        self._value_dim = 0
        self._home: torch.device | None = None  # where offloaded tensors belong

    @property
    def _is_opaque(self) -> bool:
        """Whether a graph is being compiled that is not to look into the layer."""
        return torch.compiler.is_compiling() and self.options.max_cache_len is None

    def lazy_initialization(self, key: Tensor, value: Tensor) -> None:
        """Allocate for keys and values like these, which may have no tokens."""
        self.state = self._new_state(key, value)
        self._value_dim = value.shape[3]

    def _new_state(self, key: Tensor, value: Tensor) -> PagedState:
        raise NotImplementedError

    def fork(self: _L) -> _L:
        """Another layer with the same tokens; both go on without regard to each other.

        Full pages are shared by reference count and only what is not packed is copied, so that a
        fork of a long layer costs little. A static layer has all its memory at once and its fork
        has as much: it is a whole copy. `memory_parts` of both count the pages that they share,
        which are to be used by one thread at a time.

        Returns:
            A layer of the same class.

        Example:
            >>> from torch_kvq import KVQLayer
            >>> layer = KVQLayer(bits=4)
            >>> _ = layer.update(*torch.randn(2, 1, 8, 300, 64))
            >>> answers = [layer.fork() for _ in range(3)]
            >>> _ = answers[0].update(*torch.randn(2, 1, 8, 20, 64))
            >>> [answer.get_seq_length() for answer in answers]
            [320, 300, 300]
        """
        fork = copy.copy(self)
        if self.state is not None:
            fork.state = self.state.fork()
        return fork

    @_eager
    def offload(self) -> None:
        """Move all tensors to the CPU; the next update or `prefetch` brings them back.

        What is done in between, like `crop` or `reorder_cache`, is done on the CPU.

        Example:
            >>> from torch_kvq import KVQLayer
            >>> layer = KVQLayer(bits=4)
            >>> _ = layer.update(*torch.randn(2, 1, 8, 300, 64))
            >>> layer.offload()
            >>> layer.prefetch()
        """
        if self.state is not None and self.state.device.type != "cpu":
            self._home = self.state.device
            self._move("cpu")

    def prefetch(self) -> None:
        """Bring the tensors of an offloaded layer back to their device."""
        home, self._home = self._home, None
        if home is not None:
            self._move(home)

    def _move(self, device: torch.device | str) -> None:
        if self.state is not None:
            self.state = self.state.to(device)
        if self._pending is not None:
            key, value = self._pending
            self._pending = (key.to(device), value.to(device))

    def flush(self, padding: Tensor | None = None) -> None:
        """Store what an update has kept back until attention shows the left padding.

        Args:
            padding: int ``[batch or 1]``, the padding among the tokens kept back, for rows
                without tokens so far; none when None.
        """
        if self._pending is None or self.state is None:
            return
        self.state.place(padding)
        self._store(*self._pending)
        self._pending = None

    def _store(self, key: Tensor, value: Tensor) -> None:
        """Let the state have tokens that waited for their mask."""
        assert self.state is not None
        if self.state.is_empty or key.shape[2] == 1:
            self.state.append(key, value)
        else:
            self._append_chunk(key, value)

    def _append_chunk(self, key: Tensor, value: Tensor) -> None:
        """Append tokens of which every query is to have its own exact window."""
        assert self.state is not None
        self.state.append_exact(key, value)
        self._unpacked = key.shape[2] >= TILE_TOKENS

    @_eager
    def crop(self, tokens: int) -> None:
        """Remove the last tokens of every row.

        Args:
            tokens: negative: so many are removed; positive: so many positions remain.

        Raises:
            IndexError: more are to be removed than there are.
        """
        self.flush()
        if self.state is None or tokens == 0:
            return
        length = self.state.positions
        target = min(tokens, length) if tokens > 0 else length + tokens
        if target < 0:
            raise IndexError(f"tokens={tokens} removes more than the {length} positions held")
        if target < length:
            self.state.check_crop(target)
            self._crop(target)
            self._length = target

    def _crop(self, length: int) -> None:
        assert self.state is not None
        self.state.crop(length)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i become what row ``beam_idx[i]`` is."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        if self.state is not None:
            rows = torch.arange(self.state.batch_size, device="cpu")
            self.batch_select_indices(rows.repeat_interleave(repeats))

    @_eager
    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``, int or bool, in this order.

        Raises:
            IndexError: a row that does not exist.
        """
        self.flush()
        if self.state is None:
            return
        rows = list(range(self.state.batch_size))
        selected: list[int] = torch.tensor(rows, device="cpu")[indices.cpu()].tolist()
        if not selected:
            raise IndexError("indices must select at least one row")
        if selected != rows:
            self._select(selected)

    def _select(self, rows: list[int]) -> None:
        assert self.state is not None
        self.state.select(rows)

    @_eager
    def reset(self) -> None:
        """Forget all tokens. A static layer keeps its memory, another one gives it back."""
        self._pending = None
        self._length = 0
        if isinstance(self.state, StaticState):
            self.state.crop(0)
        else:
            self.state = self._home = None

    def resize(self, max_cache_len: int) -> None:
        """Let a static layer have room for ``max_cache_len`` positions."""
        self.options = self.options.with_max_cache_len(max_cache_len)
        if isinstance(self.state, StaticState):
            self.state.resize(max_cache_len)

    @property
    def is_empty(self) -> bool:
        """Whether no position was seen yet."""
        return self._pending is None and (self.state is None or self.state.is_empty)

    @property
    def visible_length(self) -> int:
        """Columns of a mask: the positions, or all that are allocated in a static layer."""
        if self.options.max_cache_len is not None:
            return self.options.max_cache_len
        return self._length

    @property
    def _kept_back(self) -> int:
        return 0 if self._pending is None else self._pending[0].shape[2]

    def get_seq_length(self) -> int | Tensor:
        """Positions so far, left padding included; a tensor in a static layer."""
        if self.options.max_cache_len is None:
            return self.visible_length
        if self.state is None:
            return 0
        assert isinstance(self.state, StaticState)
        length = self.state.length_tensor
        return length if self._pending is None else length + self._kept_back

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns of the mask of the next call, and the position of the first."""
        if self.options.max_cache_len is not None:
            return self.options.max_cache_len, 0
        return self.visible_length + query_length, 0

    def get_max_length(self) -> int:
        """``max_cache_len``, or -1."""
        return self.options.max_cache_len or -1

    get_max_cache_shape = get_max_length

    @property
    def is_compileable(self) -> bool:
        """Whether tensors keep their addresses, so that a compiled graph serves every step."""
        return self.options.max_cache_len is not None

    @property
    def is_initialized(self) -> bool:
        """Whether the layer has allocated."""
        return self.state is not None

    @property
    def batch_size(self) -> int:
        """Number of rows, once there are any."""
        if self.state is None:
            raise AttributeError("batch_size")
        return self.state.batch_size

    @property
    def tokens(self) -> int:
        """Tokens of all rows: positions without left padding."""
        if self.state is None:
            return 0
        lengths = self.state.lengths.tolist()
        return sum(max(length + self._kept_back - start, 0) for start, length, _ in lengths)

    @property
    def fp16_bytes(self) -> int:
        """Bytes that the tokens would take uncompressed, two for each element."""
        if self.state is None:
            return 0
        state = self.state
        return self.tokens * state.kv_heads * (state.key_dim + state.value_dim) * 2

    def memory_parts(self) -> dict[str, int]:
        """Bytes of all tensors that the layer holds, by what they are for."""
        parts = {} if self.state is None else self.state.parts()
        if self._pending is not None:
            parts["pending"] = sum(map(tensor_bytes, self._pending))
        return parts

    def __repr__(self) -> str:
        name, size = type(self).__name__, sum(self.memory_parts().values())
        return f"{name}({self.options.summary}, tokens={self.tokens}, bytes={size})"
