"""Options of a tiered layer: what is near, and how much room there is for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch_kvq import formats
from torch_kvq.cache.options import RowOptions, check_count
from torch_kvq.formats import TILE_TOKENS

_LEAST_HEADROOM = 12
_HEADROOM = 12
"""One part in so many of the chosen tokens is free for those that come back."""


@dataclass(frozen=True, kw_only=True)
class TierOptions(RowOptions):
    """How a tiered layer stores its tokens.

    Attributes:
        near_ratio: share of a row's tokens that each KV head has near, sinks and window included.
        far: format of the far tier, ``"fp8-int4"`` or ``"tile4"``.
        observed_queries: last queries of a prompt by whose attention its near tokens are chosen.

    Example:
        >>> options = TierOptions()
        >>> options.chosen(tokens=4096, far=4032)
        374
        >>> options.kept_slots(374)
        409
    """

    residual_length: int = 32
    near_ratio: float = 0.1
    far: str = "fp8-int4"
    observed_queries: int = 32

    window_name: ClassVar[str] = "window"

    def __post_init__(self) -> None:
        check_count("window", self.residual_length, least=0)
        super().__post_init__()
        ratio = self.near_ratio
        if not isinstance(ratio, (int, float)) or isinstance(ratio, bool):
            raise TypeError(f"near_ratio must be a number, got {ratio!r}")
        if not 0 <= ratio <= 1:
            raise ValueError(f"near_ratio must be from 0 to 1, got {ratio}")
        if self.far not in formats.FAR_FORMATS:
            raise ValueError(f"far must be 'fp8-int4' or 'tile4', got {self.far!r}")
        check_count("observed_queries", self.observed_queries, least=1)
        if self.max_cache_len is not None:
            raise ValueError(
                f"max_cache_len must not be given, got {self.max_cache_len}: a tiered layer grows, "
                "and graphs that are compiled call it without looking into it"
            )

    @property
    def summary(self) -> str:
        """Share and format, as arguments."""
        return f"near_ratio={self.near_ratio}, far={self.far!r}"

    @property
    def kind(self) -> str:
        """The format of the far tier."""
        return self.far

    def chosen(self, tokens: int, far: int) -> int:
        """Far tokens that a KV head of a row with so many tokens has near."""
        share = math.ceil(self.near_ratio * tokens) - self.sink_tokens - self.residual_length
        return min(max(share, 0), far)

    def kept_slots(self, chosen: int) -> int:
        """Near slots for sinks, chosen tokens and those that come back."""
        return self.sink_tokens + chosen + max(chosen // _HEADROOM, _LEAST_HEADROOM)

    def spare_slots(self, recent: int, left: int) -> int:
        """Near slots for tokens to come, beside those of so many recent ones.

        Args:
            recent: tokens that are near because they are recent.
            left: tokens to come before a row gets its next tile.
        """
        return max(min(left, max(recent // 8, TILE_TOKENS)), 0)

    def fits(self, kept: int, chosen: int) -> bool:
        """Whether so many slots still leave half of the room for tokens that come back."""
        spare = max(chosen // (2 * _HEADROOM), _LEAST_HEADROOM // 2)
        return kept >= self.sink_tokens + chosen + spare
