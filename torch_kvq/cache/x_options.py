"""Options of a cache of layer inputs, checked once and shared by all layers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch_kvq.cache.options import check_count
from torch_kvq.formats import TILE_TOKENS

BITS = (2, 3, 4, 8, 16)
MODES = ("auto", "x", "cl", "latent")
AXES = ("auto", "token", "channel")


@dataclass(frozen=True)
class XOptions:
    """How layers store their inputs.

    Attributes:
        bits: bits of a stored element; 16 stores the model's own dtype.
        mode: ``"x"`` stores the input of every layer, ``"cl"`` its difference to what the layer
            before is rebuilt to, ``"latent"`` its parts in the row spaces of the key and the value
            weights; ``"auto"`` takes the one of fewest bytes.
        axis: along what a group of 64 elements with one scale runs: the channels of a
            ``"token"``, or the tokens of a ``"channel"``. ``"auto"`` is ``"token"``, also for the
            latents of keys: once channels are rotated it has less error at fewer bytes.
        sink_tokens: first tokens that stay exact, left padding included; models attend to the very
            first one so much that its error outweighs those of all others.
        residual_length: recent tokens that stay exact; up to 63 more do.
        first_layers: layers of ``"cl"`` that store their input, at no less than 4 bits; the last
            of them is where the differences begin.
        accumulator_bits: bits of the sum of differences while it is handed from layer to layer.
        absorb_value: multiply what attention takes from the inputs, and not the inputs, by the
            weight of the values; where that costs less when None.
        strict: raise where keys or values would have to be rebuilt whole.

    Example:
        >>> XOptions(bits=3, mode="cl").axis
        'auto'
    """

    bits: int = 4
    mode: str = "auto"
    axis: str = "auto"
    sink_tokens: int = 4
    residual_length: int = 128
    first_layers: int = 3
    accumulator_bits: int = 4
    absorb_value: bool | None = None
    strict: bool = False

    max_cache_len = None
    sliding_window = None

    def __post_init__(self) -> None:
        for name in ("bits", "accumulator_bits"):
            _check_choice(name, getattr(self, name), BITS)
        _check_choice("mode", self.mode, MODES)
        _check_choice("axis", self.axis, AXES)
        check_count("sink_tokens", self.sink_tokens, least=0)
        check_count("residual_length", self.residual_length, least=0)
        check_count("first_layers", self.first_layers, least=1)

    @property
    def first_bits(self) -> int:
        """Bits of the first layers of ``"cl"``."""
        return max(self.bits, 4)

    @property
    def group_axis(self) -> str:
        """``"token"`` or ``"channel"``."""
        return "token" if self.axis == "auto" else self.axis

    @property
    def summary(self) -> str:
        """The bits, as an argument."""
        return f"bits={self.bits}"

    @property
    def kind(self) -> str:
        """The bits, in words."""
        return f"{self.bits} bits"

    def with_bits(self, bits: int) -> XOptions:
        """The same options with other bits."""
        return replace(self, bits=bits)

    def fits_sliding_window(self, sliding_window: int) -> bool:
        """False: layers with a sliding window are left to Transformers."""
        return False

    def due(self, tokens: int) -> int:
        """How many of so many tokens are to be in pages.

        Example:
            >>> XOptions(residual_length=128).due(200)
            64
        """
        exact = self.sink_tokens + self.residual_length
        return max(tokens - exact, 0) // TILE_TOKENS * TILE_TOKENS


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if isinstance(value, bool) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
