"""A layer that stores its input, and makes keys and values of it when they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from torch_kvq._x_ops import dequantize_x, quantize_x
from torch_kvq.cache.handle import KVQHandle
from torch_kvq.cache.memory import tensor_bytes
from torch_kvq.cache.opaque import outside_graphs
from torch_kvq.cache.packed import PackedLayer
from torch_kvq.cache.x_options import XOptions
from torch_kvq.cache.x_shared import CosSin, Shared
from torch_kvq.cache.x_source import (
    Projection,
    Records,
    Rotary,
    Source,
    Staged,
    attend,
    rebuild,
    tokens_of,
)
from torch_kvq.cache.x_state import Stream, XState
from torch_kvq.formats import TILE_TOKENS

_eager = outside_graphs("layer inputs are stored outside of compiled graphs")

_CHECKED_TOKENS = 4
"""Tokens of an update whose keys and values are compared with those of the model."""


class XQuantLayer(PackedLayer):
    """Inputs of one attention layer, packed, from which keys and values are rebuilt.

    A hook of the model stages the input before it calls `update` with keys and values, which are
    not stored. Its options are those of `torch_kvq.XQuantCache`.

    Args:
        options: how to store tokens.
        shared: what the layers of a cache share.
        ordinal: the place of the layer among those of the cache that store their inputs.
        is_last: no layer above stores its input.

    Attributes:
        source: the attention module, None before the cache is bound to a model.
        materialized: how often keys and values were rebuilt whole for code that needs them.
    """

    options: Any
    state: Any

    def __init__(
        self, options: XOptions, shared: Shared, ordinal: int = 0, is_last: bool = False
    ) -> None:
        super().__init__(cast(Any, options))
        self.shared = shared
        self.ordinal = ordinal
        self.is_last = is_last
        self.source: Source | None = None
        self._staged: Staged | None = None
        self._rotary: Rotary | None = None
        self._kind: tuple[Any, ...] = ()
        self._like = torch.empty(0)  # the model's dtype and device
        self._unchecked = 0

    def streams(self, channels: int) -> list[Stream]:
        """What is stored of a token whose input has so many channels."""
        return [Stream(channels, self.options.bits, self.options.group_axis)]

    def attach(self, source: Source) -> None:
        """Make keys and values with the weights of an attention module."""
        if self.source is not source:
            self.source = source
            # The first update may be of position 0 alone, where any rotary embedding is the same.
            self._unchecked = 2

    def stage(self, staged: Staged) -> None:
        """Take the input of the layer, ahead of the keys and values of the same tokens."""
        self._staged = staged

    @_eager
    def update(
        self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[KVQHandle, KVQHandle]:
        """Append the tokens whose input was staged.

        Args:
            key: ``[batch, kv_heads, tokens, key_dim]``, of which the last few are compared with
                those that the input gives.
            value: ``[batch, kv_heads, tokens, value_dim]``.
            *args: ignored: Transformers hands over more.
            **kwargs: ignored.

        Returns:
            Handles of all keys and all values, for attention functions.

        Raises:
            ValueError: no input was staged, or it does not fit.
        """
        staged = self._take_staged(key)
        x, _ = self._detached(staged.x, key)
        if self._home is not None:
            self.prefetch()
        self.flush()
        self._check_kind(x, key, value)
        is_first = self.state is None or self.state.is_empty
        if self._unchecked:
            self._compare(staged, key, value)
        parts = self._parts_of(staged._replace(x=x))
        if self.state is None:
            self.state = XState(parts[0], self.streams(x.shape[2]))
            self._like = x[:, :0].clone()
        if staged.positions is not None:
            positions = staged.positions.expand(x.shape[0], -1)
            self.shared.note(self.state.length, positions)
        self._rotary = staged.rotary
        self.state.append(parts)
        self._length = self.state.length
        return self._handles(key, value, is_first)

    def _take_staged(self, key: Tensor) -> Staged:
        staged, self._staged = self._staged, None
        if staged is None:
            raise ValueError(
                "the layer's input is not known: a cache of layer inputs has to be bound to its "
                "model, by generate() or XQuantCache(model=model)"
            )
        if staged.x.shape[:2] != (key.shape[0], key.shape[2]):
            raise ValueError(
                f"the input of {self._name}, {tuple(staged.x.shape)}, is not that of its keys, "
                f"{tuple(key.shape)}"
            )
        return staged

    @property
    def _name(self) -> str:
        return "the layer" if self.source is None else self.source.name

    def _check_kind(self, x: Tensor, key: Tensor, value: Tensor) -> None:
        kind = (x.shape[0], x.shape[2], key.shape[1], key.shape[3], value.shape[3], x.dtype)
        if not self.is_empty and kind != self._kind:
            names = "batch, channels, kv heads, key dim, value dim, dtype"
            raise ValueError(
                f"{self._name} holds ({names}) {self._kind}, got {kind}: a cache belongs to one "
                "model and one batch, call reset() before it is used for another"
            )
        if x.shape[2] % TILE_TOKENS:
            raise ValueError(
                f"the input of {self._name} must have a multiple of 64 channels, got {x.shape[2]}"
            )
        self._kind = kind

    def _compare(self, staged: Staged, key: Tensor, value: Tensor) -> None:
        """Compare the last new keys and values with those that the input gives."""
        last = slice(-_CHECKED_TOKENS, None)
        cos_sin = None if staged.cos_sin is None else tokens_of(staged.cos_sin, last)
        x, key, value = staged.x.detach(), key.detach(), value.detach()
        self._bound().settle(x[:, last], key[:, :, last], value[:, :, last], cos_sin)
        self._unchecked -= 1

    def _parts_of(self, staged: Staged) -> list[Tensor]:
        """What is stored of new tokens, ``[batch, tokens, channels]`` by stream."""
        return [staged.x]

    def _handles(
        self, key: Tensor, value: Tensor, is_first: bool = False
    ) -> tuple[KVQHandle, KVQHandle]:
        decoded: list[Tensor] = []
        return (
            KVQHandle(self, key.detach(), True, self._length, decoded, is_first),
            KVQHandle(self, value.detach(), False, self._length, decoded, is_first),
        )

    def flush(self, padding: Tensor | None = None) -> None:
        """Pack the tokens that are due."""
        if self.state is None:
            return
        due = self._due()
        if due:
            records = self._encode([tail[:, :due] for tail in self.state.recent])
            self.state.pack(records, self.options.residual_length + TILE_TOKENS)

    def _due(self) -> int:
        return int(self.options.due(self.state.length - self.state.quantized))

    @_eager
    def flush_attended(
        self, query: Tensor, attn_mask: Tensor | None, options: dict[str, Any]
    ) -> None:
        """Pack the tokens that are due, after their attention."""
        self.flush()
        if self.is_last:
            self.shared.forget()

    def _encode(self, oldest: list[Tensor]) -> list[Tensor]:
        return [
            quantize_x(part, stream.bits, stream.axis)
            for part, stream in zip(oldest, self.state.streams, strict=True)
        ]

    def handed_on(self, first: int, last: int) -> Records:
        """Input of packed tokens, from which a layer above takes its differences."""
        (stream,) = self.state.streams
        records = self.state.records(0, first, last)
        return Records([records], [stream.bits], stream.axis, self.state.tails[0])

    def decode(self, first: int, last: int) -> list[Tensor]:
        """Packed tokens ``first`` to ``last``, whole pages of them, of each stream."""
        return [
            dequantize_x(
                self.state.records(index, first, last),
                stream.channels,
                stream.bits,
                stream.axis,
                dtype=self._like.dtype,
            )
            for index, stream in enumerate(self.state.streams)
        ]

    def _whole(self) -> list[Tensor]:
        """All tokens of each stream."""
        recent = self.state.recent
        if not self.state.quantized:
            return cast(list[Tensor], recent)
        packed = self.decode(0, self.state.quantized)
        return [torch.cat(pair, 1) for pair in zip(packed, recent, strict=True)]

    def _bound(self) -> Source:
        """The attention module.

        Raises:
            ValueError: there is none yet.
        """
        if self.source is None:
            raise ValueError(
                "the cache is not bound to a model, which it needs for this: call "
                "cache.bind(model), as generate() does"
            )
        return self.source

    def _projection(self) -> Projection:
        _, _, kv_heads, key_dim, value_dim, _ = self._kind
        return self._bound().projection(kv_heads, (key_dim, value_dim))

    def _cos_sin(self) -> CosSin | None:
        rotary, like = self._rotary, self._like
        if rotary is None:
            return None
        return self.shared.cos_sin(rotary, lambda positions: rotary(positions, like))

    def _parts(self, queries: int) -> Iterator[list[Records]]:
        """All tokens as attention reads them, one part behind another.

        Args:
            queries: the last tokens, which are all in the last part.
        """
        yield self._stored()

    def _stored(self) -> list[Records]:
        """Packed and exact tokens by stream."""
        return [
            Records([self.state.records(index)], [stream.bits], stream.axis, exact)
            for index, (stream, exact) in enumerate(
                zip(self.state.streams, self.state.recent, strict=True)
            )
        ]

    @_eager
    def attend(
        self,
        query: Tensor,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
        is_causal: bool = False,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        precision: str = "exact",
    ) -> Tensor:
        """Attention over all tokens of the layer.

        Args:
            query: ``[batch, heads, T, key_dim]``; its last token belongs to the last one held.
            attn_mask: bool or additive, broadcastable to ``[batch, heads, T, positions]``.
            scale: factor of the scores, ``key_dim ** -0.5`` when not given.
            is_causal: mask keys behind the query's position.
            sliding_window: attend only to the last so many positions, the query's own included.
            softcap: scores become ``softcap * tanh(score / softcap)`` before the mask.
            sinks: ``[heads]``, a logit per head that joins the softmax without a value.
            precision: ``"exact"``; there is no other.

        Returns:
            ``[batch, heads, T, value_dim]`` in the query's dtype.

        Raises:
            ValueError: no tokens, or arguments that do not fit the layer.
            NotImplementedError: the layer was offloaded since its last update.
        """
        if self.state is None:
            raise ValueError("attend() needs tokens, use the cache with generate()")
        self._check_resident()
        if precision != "exact":
            raise ValueError(f"precision must be 'exact', got {precision!r}")
        if attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        out = attend(
            query.detach(),
            self._parts(query.shape[2] if sliding_window is None else self.state.length),
            self.state.length,
            self._projection(),
            self._kind[2],
            self._cos_sin(),
            last={
                "is_causal": is_causal,
                "sliding_window": sliding_window,
                "sinks": None if sinks is None else sinks.detach(),
            },
            attn_mask=attn_mask,
            scale=scale,
            softcap=softcap,
            absorb_value=self.options.absorb_value,
        )
        self.flush_attended(query, attn_mask, {})
        return out

    @_eager
    def materialize(self, length: int) -> tuple[Tensor, Tensor]:
        """Rebuild all keys and values.

        Raises:
            RuntimeError: the layer is strict.
            NotImplementedError: the layer was offloaded since its last update.
        """
        self._check_resident()
        if self.options.strict:
            raise RuntimeError(
                "strict=True: whole keys and values were asked for, by an attention that does not "
                "read packed caches or for a result that packed attention does not give"
            )
        self.materialized += 1
        return rebuild(self._whole(), self._projection(), self._kind[2], self._cos_sin())

    @property
    def keys(self) -> KVQHandle | None:
        """A handle of all keys."""
        return self._present()[0]

    @property
    def values(self) -> KVQHandle | None:
        """A handle of all values."""
        return self._present()[1]

    def _present(self) -> tuple[KVQHandle, KVQHandle] | tuple[None, None]:
        if self.state is None:
            return None, None
        batch, _, kv_heads, key_dim, value_dim, _ = self._kind
        like = self._like
        return self._handles(
            like.new_empty((batch, kv_heads, 0, key_dim)),
            like.new_empty((batch, kv_heads, 0, value_dim)),
        )

    def _crop(self, length: int) -> None:
        decoded: list[Tensor] = []
        if length < self.state.quantized:
            first = length // TILE_TOKENS * TILE_TOKENS
            decoded = self.decode(first, first + TILE_TOKENS)
        self.state.crop(length, decoded)
        if not self.ordinal:
            self.shared.crop(length)

    def _select(self, rows: list[int]) -> None:
        self.state.select(rows)
        self._kind = (len(rows), *self._kind[1:])
        if not self.ordinal:
            self.shared.select(rows)

    @_eager
    def reset(self) -> None:
        """Forget all tokens and give their memory back."""
        super().reset()
        self._staged = None
        if not self.ordinal:
            self.shared.reset()

    def lazy_initialization(self, key: Tensor, value: Tensor) -> None:
        """Nothing: the layer's input is not known yet."""

    @property
    def tokens(self) -> int:
        """Positions of all rows, left padding included."""
        return 0 if self.state is None else self.state.length * self.state.batch_size

    @property
    def fp16_bytes(self) -> int:
        """Bytes that keys and values of the tokens would take, two for each element."""
        if self.state is None:
            return 0
        _, _, kv_heads, key_dim, value_dim, _ = self._kind
        return self.tokens * kv_heads * (key_dim + value_dim) * 2

    def memory_parts(self) -> dict[str, int]:
        """Bytes of all tensors that the layer holds; the first has those that all share."""
        parts = {} if self.state is None else self.state.parts()
        if parts and not self.ordinal:
            parts |= self.shared.parts()
        if self._staged is not None:
            parts["pending"] = tensor_bytes(self._staged.x)
        return parts

    def __getstate__(self) -> dict[str, Any]:
        # Modules stay with their model; a copy that is loaded is bound anew.
        return self.__dict__ | {"_staged": None}
