"""Byte layout of packed layer inputs (docs/formats.md, "X record"); `ops_cpu/x.h` is its mirror."""

from __future__ import annotations

from dataclasses import dataclass

from torch_kvq.formats import PASS_THROUGH_BITS, TILE_TOKENS

GROUP = 64
"""Codes of a group: the channels of a token, or the tokens of a channel."""

X_BITS = (2, 3, 4, 8, PASS_THROUGH_BITS)
X_AXES = ("token", "channel")

INT8_MOST = 127
"""Largest magnitude of an 8-bit code and of the quantised mean of a channel."""


@dataclass(frozen=True)
class XFormat:
    """Layout of one X record: 64 tokens of one row, all channels.

    Offsets and sizes are in bytes. With ``axis="token"`` a group is 64 channels of a token and has
    a scale; with ``axis="channel"`` it is the 64 tokens of a channel and has a scale and a mean.
    At 16 bits the record is the raw ``[64, channels]``, ``itemsize`` bytes an element.

    Example:
        >>> XFormat(channels=4096, bits=4).bytes_per_token
        2176.0
        >>> XFormat(1024, 4, "channel").bytes_per_token
        560.5
    """

    channels: int
    bits: int
    axis: str = "token"
    itemsize: int = 2

    def __post_init__(self) -> None:
        if self.channels < GROUP or self.channels % GROUP:
            raise ValueError(f"channels must be a positive multiple of 64, got {self.channels}")
        if self.bits not in X_BITS:
            raise ValueError(f"bits must be 2, 3, 4, 8 or 16, got {self.bits}")
        if self.axis not in X_AXES:
            raise ValueError(f"axis must be 'token' or 'channel', got {self.axis!r}")

    @property
    def is_pass_through(self) -> bool:
        """Whether the record holds the raw input."""
        return self.bits == PASS_THROUGH_BITS

    @property
    def groups(self) -> int:
        """Blocks of 64 channels."""
        return self.channels // GROUP

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales, float16 ``[64, groups]`` or ``[channels]``, at the start."""
        return 2 * self.channels

    @property
    def mean_offset(self) -> int:
        """First byte of the means, int8 ``[channels]``, with ``axis="channel"`` alone."""
        return self.scale_bytes

    @property
    def mean_scale_offset(self) -> int:
        """First byte of the scales of the means, float16 ``[groups]``."""
        return self.mean_offset + self.channels

    @property
    def code_offset(self) -> int:
        """First byte of the codes (or of the raw input)."""
        if self.is_pass_through:
            return 0
        if self.axis == "token":
            return self.scale_bytes
        return self.mean_scale_offset + 2 * self.groups

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes (or of the raw input)."""
        if self.is_pass_through:
            return TILE_TOKENS * self.channels * self.itemsize
        return TILE_TOKENS * self.channels * self.bits // 8

    @property
    def record_bytes(self) -> int:
        """Size of a record; nothing is padded."""
        return self.code_offset + self.code_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token, all metadata included."""
        return self.record_bytes / TILE_TOKENS
