"""Byte layouts of the packed cache: the single source of truth for every size and offset.

The prose definition is ``docs/formats.md``; the C++ mirror is ``ops_cpu/format.h`` and the tests
hold the two equal bit for bit.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FORMAT_VERSION = 1

TILE_TOKENS = 64
"""Tokens of one KV head in a tile; a page holds the tiles of all KV heads for the same tokens."""

RECORD_ALIGNMENT = 64
MIN_HEAD_DIM = 32
MAX_HEAD_DIM = 512
HEAD_DIM_MULTIPLE = 16
PASS_THROUGH_BITS = 16
QUANTIZED_BITS = (2, 3, 4)

BALANCE_TOKENS = 192
"""Most keys that the balance is computed from, see `balance_tokens`."""

BALANCE_FOLD = 256
"""Tokens that the sums of the balance are zero-padded to."""

VARIANCE_FLOOR = 1e-4
"""Channel variances are clamped to this share of their mean before the balance is taken."""

LARGEST_INPUT = 65504.0
"""Inputs of the encoder are clamped to this magnitude and NaN is taken as zero."""

SCALE_CANDIDATES = (0.82, 0.9, 0.98, 1.1, 1.3)

LEVELS: dict[int, tuple[int, ...]] = {
    4: (-63, -48, -37, -29, -22, -15, -9, -3, 3, 9, 15, 22, 29, 37, 48, 63),
    3: (-31, -19, -11, -4, 4, 11, 19, 31),
    2: (-10, -3, 3, 10),
}
"""Integer codebooks: Lloyd-Max for a unit Gaussian, rounded to keep byte products in range."""

LEVELS_PER_SIGMA: dict[int, float] = {4: 63 / 2.732507, 3: 31 / 2.151925, 2: 10 / 1.510412}
"""Codebook units in one standard deviation of the rotated vector."""

START, LENGTH, QUANTIZED = 0, 1, 2
"""Columns of ``lengths``: left padding, positions with padding, tokens that are in tiles."""

FAR_FORMATS = ("fp8-int4", "tile4")
"""Formats of the far tier: a record of `FarFormat`, or a tile of 4-bit codes."""

FP8_MAX = 448.0
"""Largest value of E4M3."""

FAR_VALUE_STEPS = 15
"""Steps between the lowest and the highest of 16 evenly spaced value levels."""

SKIPPED_BELOW = 16.0
"""A value whose weight is below exp(-16) of the greatest is not read, see `tiered_attention`."""

MAX_CANDIDATES = 64

_SIGN_SEED = {"key": 0x6B65797300000001, "value": 0x76616C7500000001}
_WORD = 2**64 - 1


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class TileFormat:
    """Layout of one record: a tile of 64 tokens of one KV head, keys and values together.

    Offsets and sizes are in bytes. With ``key_bits == value_bits == 16`` (the pass-through codec)
    the record is the raw keys ``[64, key_dim]`` followed by the raw values ``[64, value_dim]`` in
    the cache's dtype, ``itemsize`` bytes an element.

    Example:
        >>> TileFormat(key_dim=128, value_dim=128, key_bits=4, value_bits=4).record_bytes
        8640
        >>> TileFormat(128, 128, 4, 4).bytes_per_token
        135.0
    """

    key_dim: int
    value_dim: int
    key_bits: int
    value_bits: int
    itemsize: int = 2

    def __post_init__(self) -> None:
        check_head_dim("key_dim", self.key_dim)
        check_head_dim("value_dim", self.value_dim)
        check_bits(self.key_bits, self.value_bits)

    @property
    def is_pass_through(self) -> bool:
        """Whether the record holds raw keys and values."""
        return self.key_bits == PASS_THROUGH_BITS

    @property
    def key_scale_offset(self) -> int:
        """First byte of the key scales, float16 ``[64]``."""
        return 0

    @property
    def key_code_offset(self) -> int:
        """First byte of the key codes (or of the raw keys)."""
        return 0 if self.is_pass_through else 2 * TILE_TOKENS

    @property
    def key_code_bytes(self) -> int:
        """Bytes of the key codes (or of the raw keys)."""
        if self.is_pass_through:
            return TILE_TOKENS * self.key_dim * self.itemsize
        return TILE_TOKENS * self.key_dim * self.key_bits // 8

    @property
    def value_scale_offset(self) -> int:
        """First byte of the value scales, float16 ``[64]``."""
        return self.key_code_offset + self.key_code_bytes

    @property
    def value_code_offset(self) -> int:
        """First byte of the value codes (or of the raw values)."""
        return self.value_scale_offset + (0 if self.is_pass_through else 2 * TILE_TOKENS)

    @property
    def value_code_bytes(self) -> int:
        """Bytes of the value codes (or of the raw values)."""
        if self.is_pass_through:
            return TILE_TOKENS * self.value_dim * self.itemsize
        return TILE_TOKENS * self.value_dim * self.value_bits // 8

    @property
    def mean_offset(self) -> int:
        """First byte of the key mean, int8 ``[key_dim]``."""
        return self.value_code_offset + self.value_code_bytes

    @property
    def mean_scale_offset(self) -> int:
        """The float16 scale of the key mean."""
        return self.mean_offset + self.key_dim

    @property
    def record_bytes(self) -> int:
        """Size of a record, padded to 64 bytes."""
        end = self.mean_offset if self.is_pass_through else self.mean_scale_offset + 2
        return _round_up(end, RECORD_ALIGNMENT)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token of one KV head, keys, values and all metadata."""
        return self.record_bytes / TILE_TOKENS


@dataclass(frozen=True)
class FarFormat:
    """Layout of one far record: a tile of 64 tokens of one KV head, fp8 keys and int4 values.

    Offsets and sizes are in bytes; no part needs padding.

    Example:
        >>> FarFormat(key_dim=128, value_dim=128).record_bytes
        12672
        >>> FarFormat(128, 128).bytes_per_token, FarFormat(64, 64).bytes_per_token
        (198.0, 102.0)
    """

    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        check_head_dim("key_dim", self.key_dim)
        check_head_dim("value_dim", self.value_dim)

    @property
    def key_scale_offset(self) -> int:
        """First byte of the key scales, float16 ``[64]``."""
        return 0

    @property
    def key_code_offset(self) -> int:
        """First byte of the key codes, E4M3."""
        return 2 * TILE_TOKENS

    @property
    def key_code_bytes(self) -> int:
        """Bytes of the key codes."""
        return TILE_TOKENS * self.key_dim

    @property
    def value_scale_offset(self) -> int:
        """First byte of the value scales, float16 ``[64]``."""
        return self.key_code_offset + self.key_code_bytes

    @property
    def value_middle_offset(self) -> int:
        """First byte of the middles of the values' ranges, float16 ``[64]``."""
        return self.value_scale_offset + 2 * TILE_TOKENS

    @property
    def value_code_offset(self) -> int:
        """First byte of the value codes, int4."""
        return self.value_middle_offset + 2 * TILE_TOKENS

    @property
    def value_code_bytes(self) -> int:
        """Bytes of the value codes."""
        return TILE_TOKENS * self.value_dim // 2

    @property
    def record_bytes(self) -> int:
        """Size of a record, a multiple of 64 bytes."""
        return self.value_code_offset + self.value_code_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token of one KV head, keys, values and all metadata."""
        return self.record_bytes / TILE_TOKENS


def far_record_bytes(far: str, key_dim: int, value_dim: int) -> int:
    """Bytes of a record of the far tier.

    Args:
        far: ``"fp8-int4"``, or ``"tile4"`` for the tiles of `lut_attention` at 4 bits.
        key_dim: channels of a key.
        value_dim: channels of a value.

    Raises:
        ValueError: another format or dim.

    Example:
        >>> far_record_bytes("fp8-int4", 64, 64), far_record_bytes("tile4", 64, 64)
        (6528, 4480)
    """
    if far not in FAR_FORMATS:
        raise ValueError(f"far must be 'fp8-int4' or 'tile4', got {far!r}")
    if far == "tile4":
        return TileFormat(key_dim, value_dim, 4, 4).record_bytes
    return FarFormat(key_dim, value_dim).record_bytes


def check_head_dim(name: str, dim: int) -> None:
    """Raise ValueError unless ``dim`` is a multiple of 16 from 32 to 512."""
    if dim % HEAD_DIM_MULTIPLE or not MIN_HEAD_DIM <= dim <= MAX_HEAD_DIM:
        raise ValueError(f"{name} must be a multiple of 16 from 32 to 512, got {dim}")


def check_bits(key_bits: int, value_bits: int) -> None:
    """Raise ValueError unless both are of 2, 3, 4, or both are 16 (the pass-through codec)."""
    both = (key_bits, value_bits)
    if both == (PASS_THROUGH_BITS, PASS_THROUGH_BITS):
        return
    if not all(bits in QUANTIZED_BITS for bits in both):
        raise ValueError(
            "key_bits and value_bits must each be 2, 3 or 4, or both 16, "
            f"got key_bits={key_bits}, value_bits={value_bits}"
        )


def quantized_tokens(
    tokens: int, quantized: int, *, sink_tokens: int, residual_length: int, quantized_start: int
) -> int:
    """Tokens of a row that belong in tiles once it holds ``tokens`` attended tokens.

    Nothing is quantised up to ``quantized_start`` tokens; after that whole tiles are taken from
    the oldest tokens behind the sinks while ``residual_length`` recent ones stay exact.

    Args:
        tokens: attended tokens of the row, new ones included.
        quantized: tokens that are in tiles already.
        sink_tokens: first tokens that always stay exact.
        residual_length: recent tokens that always stay exact.
        quantized_start: length up to which nothing is quantised.

    Example:
        >>> rule = dict(sink_tokens=4, residual_length=64, quantized_start=256)
        >>> [quantized_tokens(n, 0, **rule) for n in (256, 257, 4 + 64 + 256)]
        [0, 128, 256]
    """
    if quantized == 0 and tokens <= quantized_start:
        return 0
    due = (tokens - sink_tokens - residual_length) // TILE_TOKENS * TILE_TOKENS
    return max(quantized, due)


def balance_tokens(sink_tokens: int, quantized_start: int) -> int:
    """Keys behind the sinks that the balance of a row is computed from.

    So many are there whenever a first tile is written, so that codes do not depend on how the
    tokens were cut into chunks.

    Example:
        >>> balance_tokens(sink_tokens=4, quantized_start=256)
        192
    """
    return min(BALANCE_TOKENS, max(TILE_TOKENS, quantized_start + 1 - sink_tokens))


@functools.lru_cache(maxsize=64)
def _sign_list(kind: str, dim: int) -> tuple[float, ...]:
    state, words = _SIGN_SEED[kind], []
    for _ in range(-(-dim // 64)):  # splitmix64
        state = (state + 0x9E3779B97F4A7C15) & _WORD
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
        words.append(word ^ (word >> 31))
    return tuple(-1.0 if words[i // 64] >> (i % 64) & 1 else 1.0 for i in range(dim))


def signs(kind: Literal["key", "value"], dim: int) -> Tensor:
    """Rademacher signs of the format, float32 ``[dim]``.

    The stream is splitmix64 from a fixed seed for keys and one for values; bit ``i % 64`` of word
    ``i // 64`` set means -1 in channel ``i`` (docs/formats.md, "Rotation").

    Example:
        >>> signs("key", 64).abs().sum().item()
        64.0
    """
    return torch.tensor(_sign_list(kind, dim), dtype=torch.float32, device="cpu")
