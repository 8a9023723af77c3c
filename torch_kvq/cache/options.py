"""Options of a layer: parsed and checked once, shared by all layers of a cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

from torch_kvq import formats

_O = TypeVar("_O", bound="RowOptions")


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Which tokens of a row stay exact, whatever becomes of the others.

    Attributes:
        sink_tokens: first tokens of a row that stay exact.
        residual_length: recent tokens that stay exact.
        quantized_start: tokens up to which nothing is quantised.
        max_cache_len: positions to allocate at once; the layer grows when None.
        strict: raise where keys or values would have to be decoded for an attention that does not
            read them packed.
        sliding_window: positions that a query attends to, its own included; earlier ones are given
            up. All when None.
        window_name: what a layer's arguments call ``residual_length``.

    Example:
        >>> RowOptions(sink_tokens=4, residual_length=32).window_slots
        100
    """

    sink_tokens: int = 4
    residual_length: int = 64
    quantized_start: int = 256
    max_cache_len: int | None = None
    strict: bool = False
    sliding_window: int | None = None

    window_name: ClassVar[str] = "residual_length"

    def __post_init__(self) -> None:
        for name in ("sink_tokens", "residual_length", "quantized_start"):
            check_count(name, getattr(self, name), least=0)
        if self.max_cache_len is not None:
            check_count("max_cache_len", self.max_cache_len, least=1)
        if self.sliding_window is not None:
            self._check_sliding_window(self.sliding_window)

    def _check_sliding_window(self, sliding_window: int) -> None:
        if self.max_cache_len is not None:
            raise ValueError(
                "max_cache_len must not be given together with sliding_window: a layer that is "
                "allocated at once has room for all positions"
            )
        check_count("sliding_window", sliding_window, least=1)
        if not self.fits_sliding_window(sliding_window):
            raise ValueError(
                f"sliding_window must exceed {self.window_name} + {formats.TILE_TOKENS}, the "
                f"tokens that stay exact, got {sliding_window} with "
                f"{self.window_name}={self.residual_length}"
            )

    @property
    def summary(self) -> str:
        """The arguments that make a layer what it is."""
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """How tokens are packed, in words."""
        raise NotImplementedError

    @property
    def window_slots(self) -> int:
        """Slots of the exact buffer that a row with tiles needs."""
        return self.sink_tokens + self.residual_length + formats.TILE_TOKENS

    @property
    def exact_slots(self) -> int:
        """Slots of the exact buffer that any row can come to need."""
        return max(self.window_slots, self.quantized_start)

    def with_max_cache_len(self: _O, max_cache_len: int) -> _O:
        """The same options with another capacity."""
        return replace(self, max_cache_len=max_cache_len)

    def with_sliding_window(self: _O, sliding_window: int) -> _O:
        """The same options for a layer with a sliding window."""
        return replace(self, sliding_window=sliding_window)

    def fits_sliding_window(self, sliding_window: int) -> bool:
        """Whether a window is longer than what stays exact, so that packing it gains something."""
        return sliding_window > self.residual_length + formats.TILE_TOKENS

    def quantized(self, tokens: int, quantized: int, residual_length: int | None = None) -> int:
        """Tokens of a row that belong in tiles (`torch_kvq.formats.quantized_tokens`)."""
        return formats.quantized_tokens(
            tokens,
            quantized,
            sink_tokens=self.sink_tokens,
            residual_length=self.residual_length if residual_length is None else residual_length,
            quantized_start=self.quantized_start,
        )

    def next_tile(self, quantized: int) -> int:
        """Fewest tokens at which a row with ``quantized`` tokens in tiles gets another tile.

        Example:
            >>> RowOptions().next_tile(128)
            260
        """
        whole = quantized // formats.TILE_TOKENS * formats.TILE_TOKENS
        due = whole + self.window_slots
        return due if quantized else max(due, self.quantized_start + 1)


@dataclass(frozen=True)
class LayerOptions(RowOptions):
    """How a packed layer stores its tokens.

    Attributes:
        key_bits: 2, 3 or 4, or 16 (pass-through).
        value_bits: 2, 3 or 4, or 16 (pass-through); at most ``key_bits``.

    Example:
        >>> LayerOptions.parse("4/3").value_bits
        3
    """

    key_bits: int
    value_bits: int

    def __post_init__(self) -> None:
        formats.check_bits(self.key_bits, self.value_bits)
        if self.key_bits < self.value_bits:
            raise ValueError(
                "key_bits must not be below value_bits, keys are the more sensitive: "
                f"got key_bits={self.key_bits}, value_bits={self.value_bits}"
            )
        super().__post_init__()

    @classmethod
    def parse(
        cls,
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
    ) -> LayerOptions:
        """Options from a preset.

        Args:
            bits: 2, 3, 4 or 16 for keys and values alike, or a text like ``"4/3"``, keys first.
            key_bits: overrides the keys' part of ``bits``.
            value_bits: overrides the values' part of ``bits``.
            sink_tokens: see the class, as for the others.
            residual_length: recent tokens that stay exact.
            quantized_start: tokens up to which nothing is quantised.
            max_cache_len: positions to allocate at once.
            strict: raise instead of decoding.
            sliding_window: positions that a query attends to.

        Raises:
            ValueError: bits that do not exist, or fewer for the keys than for the values.
            TypeError: an option of another type.
        """
        preset = parse_bits(bits)
        return cls(
            preset[0] if key_bits is None else key_bits,
            preset[1] if value_bits is None else value_bits,
            sink_tokens=sink_tokens,
            residual_length=residual_length,
            quantized_start=quantized_start,
            max_cache_len=max_cache_len,
            strict=strict,
            sliding_window=sliding_window,
        )

    @property
    def bits(self) -> str:
        """The preset's name, such as ``"4"`` or ``"4/3"``."""
        if self.key_bits == self.value_bits:
            return str(self.key_bits)
        return f"{self.key_bits}/{self.value_bits}"

    @property
    def summary(self) -> str:
        """The bits, as an argument."""
        return f"bits={self.bits}"

    @property
    def kind(self) -> str:
        """The bits, in words."""
        return f"{self.bits} bits"


def parse_bits(bits: int | str) -> tuple[int, int]:
    """Bits of keys and values from a preset.

    Example:
        >>> parse_bits(3), parse_bits("4/2")
        ((3, 3), (4, 2))
    """
    parts = bits.split("/") if isinstance(bits, str) else [bits]
    try:
        numbers = [int(part) for part in parts]
    except (TypeError, ValueError):
        numbers = []
    if isinstance(bits, bool) or len(numbers) not in (1, 2):
        given = repr(bits) if isinstance(bits, (int, str)) else type(bits).__name__
        raise ValueError(f'bits must be 2, 3, 4, 16 or a text like "4/3", got {given}')
    return numbers[0], numbers[-1]


def check_count(name: str, value: object, least: int) -> None:
    """Raise unless an option is an int of at least ``least``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
