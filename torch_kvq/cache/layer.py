"""A packed key/value cache for one attention layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_kvq.cache import exact
from torch_kvq.cache.options import LayerOptions
from torch_kvq.cache.packed import PackedLayer
from torch_kvq.cache.state import LayerState
from torch_kvq.cache.static import StaticState

_attention = torch.ops.kvq.lut_attention.default


class KVQLayer(PackedLayer):
    """Keys and values of one attention layer, packed and attended while they stay packed.

    It needs nothing but PyTorch: call `update` with the new keys and values, then `attend`. It is
    also a layer of a Transformers ``Cache``, see `torch_kvq.KVQCache`.

    The first tokens of a row and the most recent ones stay exact, and nothing is packed up to
    ``quantized_start`` tokens. Attention of the first call, the prompt's, is exact. Its mask shows
    the left padding, which is not stored; for a row that is masked throughout, the next call's
    mask does. Later tokens that come many at a time are packed after their attention, so that each
    of their queries sees its own recent tokens exact.

    Args:
        bits: 2, 3, 4, 16 (pass-through) or a text like ``"4/3"``, keys first.
        key_bits: bits of the keys, overrides ``bits``.
        value_bits: bits of the values, overrides ``bits``; at most ``key_bits``.
        sink_tokens: first tokens of a row that stay exact.
        residual_length: recent tokens that stay exact; up to 63 more do.
        quantized_start: tokens up to which nothing is packed.
        max_cache_len: positions to allocate at once, for graphs that are compiled; the layer grows
            when not given.
        strict: raise a RuntimeError where keys or values would have to be decoded for code that
            does not attend to them packed.
        sliding_window: positions that a query attends to, its own included, more than
            ``residual_length + 64``. Packed tokens behind it are given up, so that the layer does
            not grow with the context; it cannot be combined with ``max_cache_len``.

    Attributes:
        materialized: how often keys and values were decoded for such code.
        said: warnings that were given; the layers of a cache share it.

    Raises:
        ValueError: an option outside the above.
        TypeError: an option of another type.

    Example:
        >>> layer = KVQLayer(bits=4)
        >>> key, value = torch.randn(2, 1, 8, 300, 64)
        >>> query = torch.randn(1, 32, 300, 64)
        >>> _ = layer.update(key, value)
        >>> layer.attend(query, is_causal=True).shape
        torch.Size([1, 32, 300, 64])
        >>> _ = layer.update(key[:, :, :1], value[:, :, :1])
        >>> layer.attend(query[:, :, :1]).shape
        torch.Size([1, 32, 1, 64])
        >>> layer
        KVQLayer(bits=4, tokens=301, bytes=650264)
    """

    options: LayerOptions
    state: LayerState | None

    def __init__(
        self,
        bits: int | str = 4,
        *,
        key_bits: int | None = None,
        value_bits: int | None = None,
        sink_tokens: int = 4,
        residual_length: int = 64,
        quantized_start: int = 256,
        max_cache_len: int | None = None,
        strict: bool = False,
        sliding_window: int | None = None,
    ) -> None:
        self._setup(
            LayerOptions.parse(
                bits,
                key_bits=key_bits,
                value_bits=value_bits,
                sink_tokens=sink_tokens,
                residual_length=residual_length,
                quantized_start=quantized_start,
                max_cache_len=max_cache_len,
                strict=strict,
                sliding_window=sliding_window,
            )
        )

    @classmethod
    def from_options(cls, options: LayerOptions) -> KVQLayer:
        """A layer with options that were parsed before."""
        layer = cls.__new__(cls)
        layer._setup(options)
        return layer

    def _setup(self, options: LayerOptions) -> None:
        super().__init__(options)
        self._format = {
            "key_bits": options.key_bits,
            "value_bits": options.value_bits,
            "sink_tokens": options.sink_tokens,
        }

    def _new_state(self, key: Tensor, value: Tensor) -> LayerState:
        kind = LayerState if self.options.max_cache_len is None else StaticState
        return kind(key, value, self.options)

    def _read(self, query: Tensor, attn_mask: Tensor | None, options: dict[str, Any]) -> Tensor:
        assert self.state is not None
        out, _ = _attention(query, *self.state.tensors, attn_mask, **self._format, **options)
        return out

    def _decode(self, length: int) -> tuple[Tensor, Tensor]:
        assert self.state is not None
        return exact.decode(self.state, length)
