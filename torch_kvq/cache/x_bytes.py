"""Bytes that a token takes in each mode, all metadata included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch_kvq.cache.x_options import XOptions
from torch_kvq.cache.x_state import Stream
from torch_kvq.formats import TILE_TOKENS, TileFormat

_POSITION = 4
_PAGE_NUMBER = 4


class LayerDims(NamedTuple):
    """Sizes of an attention layer.

    Attributes:
        channels: of its input.
        kv_heads: heads of keys and values.
        key_dim: channels of a key.
        value_dim: channels of a value.
    """

    channels: int
    kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def latents(self) -> tuple[int, int]:
        """Latent channels of keys and values: as many as the weights can have singular values."""
        return tuple(  # type: ignore[return-value]
            -(-min(self.channels, self.kv_heads * dim) // TILE_TOKENS) * TILE_TOKENS
            for dim in (self.key_dim, self.value_dim)
        )


def bytes_per_token(
    options: XOptions, layers: Sequence[LayerDims], itemsize: int = 2
) -> dict[str, float]:
    """Bytes of a token in pages, summed over layers, in every mode and beside them.

    Args:
        options: bits, axis and the layers of ``"cl"``; the mode does not matter.
        layers: the layers that store their input.
        itemsize: bytes of an element of the model's dtype, for 16 bits.

    Returns:
        By ``"x"``, ``"cl"``, ``"latent"``, ``"KVQCache"`` (packed keys and values at the same
        bits, 4 at most) and ``"fp16"`` (keys and values as they are).

    Example:
        >>> layers = [LayerDims(4096, 32, 128, 128)] * 32
        >>> sizes = bytes_per_token(XOptions(bits=2), layers)
        >>> [round(sizes["fp16"] / sizes[mode], 1) for mode in ("x", "cl", "latent", "KVQCache")]
        [14.2, 12.4, 7.1, 7.2]
    """

    def size(channels: int, bits: int, axis: str = options.group_axis) -> float:
        return Stream(channels, bits, axis).record_bytes(itemsize) / TILE_TOKENS

    shared = _POSITION + len(layers) * _PAGE_NUMBER / TILE_TOKENS
    cross = 0.0
    for ordinal, layer in enumerate(layers):
        is_first = ordinal < options.first_layers
        cross += size(layer.channels, options.first_bits if is_first else options.bits)
    if len(layers) > options.first_layers + 1:
        cross += size(layers[0].channels, options.accumulator_bits, "token")
    latent = sum(size(channels, options.bits) for layer in layers for channels in layer.latents)
    bits = options.bits if options.bits in (2, 3, 16) else 4
    return {
        "x": shared + sum(size(layer.channels, options.bits) for layer in layers),
        "cl": shared + cross,
        "latent": shared + latent,
        "KVQCache": sum(_tile_bytes(layer, bits, itemsize) for layer in layers),
        "fp16": sum(2 * layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers),
    }


def _tile_bytes(layer: LayerDims, bits: int, itemsize: int) -> float:
    layout = TileFormat(layer.key_dim, layer.value_dim, bits, bits, itemsize)
    return (layer.kv_heads * layout.record_bytes + _PAGE_NUMBER) / TILE_TOKENS


def fewest_bytes(sizes: dict[str, float], modes: Sequence[str] = ("x", "latent", "cl")) -> str:
    """The mode of fewest bytes, of equal ones the first.

    Example:
        >>> fewest_bytes({"x": 10.0, "cl": 11.0, "latent": 10.0})
        'x'
    """
    return min(modes, key=lambda mode: sizes[mode])
