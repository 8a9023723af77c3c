"""A key/value cache of two tiers for one attention layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_kvq.cache.handle import KVQHandle
from torch_kvq.cache.packed import PackedLayer
from torch_kvq.cache.promotion import LayerPromotion
from torch_kvq.cache.tier_options import TierOptions
from torch_kvq.cache.tiered_state import TieredState

_attention = torch.ops.kvq.tiered_attention.default

_CANDIDATES = 8
"""Far tokens that the operator names at each step, for promotion."""


class TieredLayer(PackedLayer):
    """Keys and values of one attention layer: exact near tokens, compressed far ones.

    Near are the first tokens of a row, its window of recent ones and, for each KV head, those that
    are attended to most. By the attention of a prompt's last queries these are chosen first. While
    decoding, new tokens are near until 64 of them have left the window; then the most used of these
    and of those chosen before stay near. Each token counts once: its far copy is masked while it is
    near.

    It needs nothing but PyTorch: call `update` with the new keys and values, then `attend`. It is
    also a layer of a Transformers ``Cache``, see `torch_kvq.TieredCache`.

    Args:
        near_ratio: share of a row's tokens that each KV head has near, sinks and window included.
        far: format of the far tier, ``"fp8-int4"`` or ``"tile4"``.
        sink_tokens: first tokens of a row that stay near.
        window: recent tokens that stay near; up to 63 more do.
        quantized_start: tokens up to which all are near.
        observed_queries: last queries of a prompt by whose attention its near tokens are chosen.
        strict: raise a RuntimeError where keys or values would have to be decoded for code that
            does not attend to them packed.
        sliding_window: positions that a query attends to, its own included; more than
            ``window + 64``. Tiles that have left it are given up, and the near tokens among them.

    Attributes:
        materialized: how often keys and values were decoded for such code.
        promotion: brings tokens back from the archive of a cache; None without one.

    Raises:
        ValueError: an option outside the above.
        TypeError: an option of another type.

    Example:
        >>> layer = TieredLayer(near_ratio=0.2)
        >>> key, value = torch.randn(2, 1, 8, 300, 64)
        >>> query = torch.randn(1, 32, 300, 64)
        >>> _ = layer.update(key, value)
        >>> layer.attend(query, is_causal=True).shape
        torch.Size([1, 32, 300, 64])
        >>> _ = layer.update(key[:, :, :1], value[:, :, :1])
        >>> layer.attend(query[:, :, :1]).shape
        torch.Size([1, 32, 1, 64])
        >>> layer.state.lengths
        tensor([[  0, 301, 256]], dtype=torch.int32)
    """

    observes = True
    options: TierOptions
    state: TieredState | None

    def __init__(
        self,
        near_ratio: float = 0.1,
        far: str = "fp8-int4",
        *,
        sink_tokens: int = 4,
        window: int = 32,
        quantized_start: int = 256,
        observed_queries: int = 32,
        strict: bool = False,
        sliding_window: int | None = None,
    ) -> None:
        self._setup(
            TierOptions(
                near_ratio=near_ratio,
                far=far,
                sink_tokens=sink_tokens,
                residual_length=window,
                quantized_start=quantized_start,
                observed_queries=observed_queries,
                strict=strict,
                sliding_window=sliding_window,
            )
        )

    @classmethod
    def from_options(cls, options: TierOptions) -> TieredLayer:
        """A layer with options that were checked before."""
        layer = cls.__new__(cls)
        layer._setup(options)
        return layer

    def _setup(self, options: TierOptions) -> None:
        super().__init__(options)
        self.promotion: LayerPromotion | None = None
        self._seen: tuple[Tensor, Tensor] | None = None  # mass and use of the tokens kept back
        self._format = {
            "far": options.far,
            "sink_tokens": options.sink_tokens,
            "candidates": _CANDIDATES,
        }

    def update(
        self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[KVQHandle, KVQHandle]:
        """Append new keys and values, see `PackedLayer.update`."""
        handles = super().update(key, value, *args, **kwargs)
        if self.promotion is not None and not self._is_opaque:
            self.promotion.append(key.detach(), value.detach())
        return handles

    def lazy_initialization(self, key: Tensor, value: Tensor) -> None:
        """Allocate for keys and values like these, which may have no tokens."""
        super().lazy_initialization(key, value)
        if self.promotion is not None:
            # One that was cut to nothing may have had other rows.
            self.promotion.reset()

    def _new_state(self, key: Tensor, value: Tensor) -> TieredState:
        return TieredState(key, value, self.options)

    def _observe(self, query: Tensor, attn_mask: Tensor | None, options: dict[str, Any]) -> None:
        assert self._pending is not None
        key, last = self._pending[0], self.options.observed_queries
        if attn_mask is not None and attn_mask.shape[2] > 1:
            attn_mask = attn_mask[:, :, -last:]
        options = {name: value for name, value in options.items() if name != "precision"}
        if options.get("sinks") is not None:
            options["sinks"] = options["sinks"].detach()
        self._seen = torch.ops.kvq.attention_mass(query[:, :, -last:], key, attn_mask, **options)

    def _store(self, key: Tensor, value: Tensor) -> None:
        assert self.state is not None
        if self.state.is_empty:
            self.state.append_prompt(key, value, *(self._seen or ()))
        else:
            super()._store(key, value)
        self._seen = None

    def _read(self, query: Tensor, attn_mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        state, promotion = self.state, self.promotion
        assert state is not None
        if promotion is not None:
            promotion.publish(state)
        balance = state.balance if state.balance.shape[2] else None
        out, _, index, score, near_score, _ = _attention(
            query, *state.tensors, attn_mask, balance=balance, **self._format, **options
        )
        state.note_use(near_score)
        if promotion is not None:
            promotion.submit(state, index, score)
        return out

    def _decode(self, length: int) -> tuple[Tensor, Tensor]:
        assert self.state is not None
        return self.state.decode(length)

    def _crop(self, length: int) -> None:
        assert self.state is not None
        before = self.state.lengths[:, 2].tolist()
        super()._crop(length)
        if self.promotion is None:
            return
        self.promotion.crop(length)
        for row, far in enumerate(self.state.lengths[:, 2].tolist()):
            if far < before[row]:
                self.promotion.restore(self.state, row)

    def _select(self, rows: list[int]) -> None:
        super()._select(rows)
        if self.promotion is not None:
            self.promotion.reorder(rows)

    def reset(self) -> None:
        """Forget all tokens and give their memory back."""
        super().reset()
        self._seen = None
        if self.promotion is not None:
            self.promotion.reset()

    def fork(self) -> TieredLayer:
        """Another layer with the same tokens, see `CacheLayer.fork`; alone it has no archive."""
        fork = super().fork()
        fork.promotion = None
        return fork
