"""What packed layers have in common: tokens that come, and the attention that follows."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor

from torch_kvq import _checks
from torch_kvq.cache import exact, opaque
from torch_kvq.cache.handle import KVQHandle
from torch_kvq.cache.options import RowOptions
from torch_kvq.cache.padding import left_padding
from torch_kvq.cache.protocol import CacheLayer

_log = logging.getLogger("torch_kvq")


class PackedLayer(CacheLayer):
    """Keys and values of one attention layer that attention reads packed.

    Attributes:
        materialized: how often keys and values were decoded for code that does not do so.
        said: warnings that were given; the layers of a cache share it.
        observes: the queries of the first attention decide how its tokens are stored.
    """

    observes = False

    def __init__(self, options: RowOptions) -> None:
        super().__init__(options)
        self.materialized = 0
        self.said: set[str] = set()
        self.ticket = opaque.enroll(self) if options.max_cache_len is None else None

    def _read(self, query: Tensor, attn_mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        """Attention over the tokens of the state."""
        raise NotImplementedError

    def _decode(self, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the state by position, zero where there is no token."""
        raise NotImplementedError

    def _observe(self, query: Tensor, attn_mask: Tensor | None, options: dict[str, Any]) -> None:
        """See the queries that attended to the tokens kept back, before these are stored."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let a copy go by a ticket of its own."""
        self.__dict__.update(state)
        if self.ticket is not None:
            self.ticket = opaque.enroll(self)

    def update(
        self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[KVQHandle, KVQHandle]:
        """Append new keys and values.

        Args:
            key: ``[batch, kv_heads, tokens, key_dim]``, float32, float16 or bfloat16.
            value: ``[batch, kv_heads, tokens, value_dim]`` in the same dtype.
            *args: ignored: Transformers hands over more.
            **kwargs: ignored.

        Returns:
            Handles of all keys and all values, for attention functions.

        Raises:
            ValueError: shapes or a dtype outside the above, or others than the layer holds.
            TypeError: something else than tensors.
            IndexError: more tokens than ``max_cache_len``.
        """
        if self._is_opaque:
            return self._update_opaque(key, value)
        if self._home is not None:
            self.prefetch()
        state = self.state
        if state is None or not state.knows_padding(key):
            return self._update_first(key, value)
        try:
            if key.requires_grad or value.requires_grad:
                key, value = self._detached(key, value)
            if key.shape[2] == 1:
                state.append(key, value)
            else:
                self._append_chunk(key, value)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            self._check_new(key, value)
            raise
        self._length = length = state.visible_length
        decoded: list[Tensor] = []
        return (
            KVQHandle(self, key, True, length, decoded),
            KVQHandle(self, value, False, length, decoded),
        )

    def _update_opaque(self, key: Tensor, value: Tensor) -> tuple[KVQHandle, KVQHandle]:
        """Update within a compiled graph, which knows of the layer its length and no more."""
        opaque.update(self, key, value)
        is_first = self._length == 0
        self._value_dim = value.shape[3]
        self._length += key.shape[2]
        decoded: list[Tensor] = []
        return (
            KVQHandle(self, key, True, self._length, decoded, is_first),
            KVQHandle(self, value, False, self._length, decoded, is_first),
        )

    def _update_first(self, key: Tensor, value: Tensor) -> tuple[KVQHandle, KVQHandle]:
        """Update while a row may be without its first token: attention shows where it is."""
        self._check_new(key, value)
        self.flush()
        if self.state is None or self._holds() != _kind(key, value):
            self.lazy_initialization(key, value)
        assert self.state is not None
        if self.state.knows_padding(key):
            # Not that of a subclass, which would be called twice for these tokens.
            return PackedLayer.update(self, key, value)
        self.state.check_room(key.shape[2])
        self._pending = self._detached(key, value)
        self._length = self.state.visible_length + key.shape[2]
        keys, values = self.keys, self.values
        assert keys is not None and values is not None
        values.decoded = keys.decoded
        return keys, values

    def _detached(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values without their history, which a cache that outlives it must not hold."""
        needs_gradients = key.requires_grad or value.requires_grad
        if needs_gradients and "gradients" not in self.said and not torch.compiler.is_compiling():
            self.said.add("gradients")
            _log.warning(
                "a packed cache stores keys and values without their gradients, and packed "
                "attention has none: call the model under torch.no_grad(), or train it without a "
                "cache"
            )
        return key.detach(), value.detach()

    def flush_attended(
        self, query: Tensor, attn_mask: Tensor | None, options: dict[str, Any]
    ) -> None:
        """Store what was kept back once it was attended to, without the padding that a mask shows.

        Args:
            query: the queries of the attention call, ``[batch, heads, queries, key_dim]``.
            attn_mask: bool or additive ``[batch or 1, heads or 1, queries or 1, positions]``.
            options: of the attention call, as `attend` takes them.
        """
        if self._is_opaque:
            opaque.flush_attended(self, query, attn_mask, options)
            return
        if self._pending is None or self.state is None:
            return
        self._check_resident()
        if self.observes and self.state.is_empty:
            self._observe(query.detach(), attn_mask, options)
        queries = query.shape[2]
        before = self.state.columns_before
        self.flush(left_padding(attn_mask, queries, before, self._kept_back))

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

        Query i of T belongs to position ``length - T + i``. After the first `update` this is exact
        attention over its keys and values, which are packed afterwards.

        Args:
            query: ``[batch, heads, T, key_dim]``, heads a multiple of the KV heads.
            attn_mask: bool (True = attend) or additive, broadcastable to
                ``[batch, heads, T, positions]``; columns are positions, padding included.
            scale: factor of the scores, ``key_dim ** -0.5`` when not given.
            is_causal: mask keys behind the query's position.
            sliding_window: attend only to the last so many positions, the query's own included;
                that of the layer when not given.
            softcap: scores become ``softcap * tanh(score / softcap)`` before the mask.
            sinks: ``[heads]``, a logit per head that joins the softmax without a value.
            precision: ``"exact"`` or ``"fast"``, see `torch_kvq.lut_attention`.

        Returns:
            ``[batch, heads, T, value_dim]`` in the query's dtype.

        Raises:
            ValueError: no tokens, or arguments that do not fit the layer.
            NotImplementedError: the layer was offloaded since its last update.
        """
        if self._home is not None and not self._is_opaque:
            self._check_resident()
        if attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
        window = self.options.sliding_window
        if window is not None:
            sliding_window = window if sliding_window is None else min(sliding_window, window)
        options: dict[str, Any] = {"scale": scale}
        is_plain = sliding_window is None and softcap is None and sinks is None
        # Reading an argument of an operator takes time even when it is the default.
        if is_causal or not is_plain or precision != "exact":
            options["is_causal"] = is_causal
            options["sliding_window"] = sliding_window
            options["softcap"] = softcap
            options["sinks"] = sinks
            options["precision"] = precision
        if self._is_opaque:
            return opaque.attend(self, query, attn_mask, self._value_dim, options)
        if self._pending is not None:
            out = self._attend_pending(query, attn_mask, options)
            if out is not None:
                return out
        if self.state is None:
            raise ValueError("attend() needs tokens, call update() before")
        if window is not None:
            self.state.check_queries(query.shape[2])
        if query.requires_grad:
            query = query.detach()
            options["sinks"] = None if sinks is None else sinks.detach()
        out = self._read(query, attn_mask, options)
        if self._unpacked:
            self._unpacked = False
            self.state.pack()
        return out

    def _attend_pending(
        self, query: Tensor, attn_mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor | None:
        """Attend to the first tokens, or store new ones and leave attention to the caller."""
        assert self._pending is not None and self.state is not None
        key, value = self._pending
        out = None
        if self.state.is_empty:
            out = exact.attend_exact(query, key, value, attn_mask, **options)
        else:
            _checks.check_query(query, key, attn_mask, None, None, None, "exact")
        self.flush_attended(query, attn_mask, options)
        return out

    @opaque.outside_graphs("keys and values are decoded outside of compiled graphs")
    def materialize(self, length: int) -> tuple[Tensor, Tensor]:
        """Decode the first ``length`` positions, zero where there is no token.

        Returns:
            ``[batch, kv_heads, length, key_dim]`` and ``[batch, kv_heads, length, value_dim]``.

        Raises:
            RuntimeError: the layer is strict.
            NotImplementedError: the layer was offloaded since its last update.
        """
        if self.options.strict:
            raise RuntimeError(
                "strict=True: decoded keys and values were asked for, by an attention that does "
                "not read them packed or for a result that packed attention does not give "
                "(attention weights, dropout, a position bias)"
            )
        self._check_resident()
        self.flush()
        if self.state is None:
            raise ValueError("materialize() needs tokens, call update() before")
        self.materialized += 1
        return self._decode(length)

    @property
    def keys(self) -> KVQHandle | None:
        """A handle of all keys."""
        return self._handle(True)

    @property
    def values(self) -> KVQHandle | None:
        """A handle of all values."""
        return self._handle(False)

    def _handle(self, is_key: bool) -> KVQHandle | None:
        if self.state is None:
            return None
        pair, is_first = self.state.exact, False
        if self._pending is not None:
            pair, is_first = self._pending, self.state.is_empty
        new = pair[0 if is_key else 1]
        return KVQHandle(self, new, is_key, self.visible_length, [], is_first)

    def _check_new(self, key: Tensor, value: Tensor) -> None:
        """Raise for keys and values that cannot be stored, or not beside those in the layer."""
        for name, tensor in (("key", key), ("value", value)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if not self.is_empty and key.dim() == value.dim() == 4:
            held, new = self._holds(), _kind(key, value)
            if held != new:
                raise ValueError(
                    f"the layer holds {held}, got {new}: a cache belongs to one model and one "
                    "batch, call reset() before it is used for another"
                )
        _checks.check_new_tokens(key, value)
        _checks.check_same_device(key=key, value=value)
        if not (key.shape[0] and key.shape[1]):
            raise ValueError(f"key must not be empty, got shape {tuple(key.shape)}")

    def _holds(self) -> str:
        assert self.state is not None
        return _kind(*self.state.exact)

    def _check_resident(self) -> None:
        """Raise for what happens between an update and its attention in a cache that offloads."""
        if self._home is not None:
            raise NotImplementedError(
                f"the layer was moved from {self._home} to the CPU between its update and its "
                "attention, which reads it, as Transformers' Cache(offloading=True) does: call "
                "offload() between calls of the model, and prefetch() to read a layer without an "
                "update"
            )


def _kind(key: Tensor, value: Tensor) -> str:
    """What must not change from one update to the next, in words."""
    batch, kv_heads, _, key_dim = key.shape
    return (
        f"batch {batch}, {kv_heads} kv heads of {key_dim} and {value.shape[3]} channels, "
        f"{key.dtype} on {key.device}"
    )
