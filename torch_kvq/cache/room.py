"""How many pages tokens take. Nothing here touches a tensor."""

from __future__ import annotations

from torch_kvq.cache.options import RowOptions
from torch_kvq.formats import TILE_TOKENS

_GROWTH = 8
"""What runs out grows by one part in so many."""

SLICE = 8 * TILE_TOKENS
"""Tokens of a prompt that a layer with a sliding window takes at a time."""

_LATE = TILE_TOKENS
"""Tokens by which a page outlives a sliding window, so that a draft can be taken back."""


def pages_of(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // TILE_TOKENS)


def grown(held: int, missing: int) -> int:
    """Size of a pool of ``held`` pages once ``missing`` more are needed."""
    return held + max(missing, held // _GROWTH)


def is_sparse(held: int, used: int) -> bool:
    """Whether so few pages of a pool are used that it is worth to move them.

    Example:
        >>> is_sparse(held=120, used=30), is_sparse(held=120, used=60), is_sparse(held=8, used=1)
        (True, False, False)
    """
    return held > 2 * used + 2 * _GROWTH


def widened(pages: int) -> int:
    """Columns of a block table once a row has so many pages."""
    return pages + pages // _GROWTH


def pages_behind_window(options: RowOptions, tokens: int, quantized: int) -> int:
    """Pages of a row, from its first, that no later query attends to.

    Example:
        >>> pages_behind_window(RowOptions(sliding_window=1000), 2000, quantized=1856)
        14
    """
    if options.sliding_window is None:
        return 0
    behind = tokens - options.sliding_window - _LATE - options.sink_tokens
    return min(max(behind, 0), quantized) // TILE_TOKENS


def pages_of_prompt(options: RowOptions, batch: int, tokens: int) -> tuple[int, int]:
    """Pages of a growing layer's pool after a prompt without padding, and columns of its table.

    Example:
        >>> pages_of_prompt(RowOptions(), batch=2, tokens=2000)
        (60, 33)
    """
    pool = used = columns = quantized = freed = 0
    step = tokens if options.sliding_window is None else SLICE
    for seen in range(step, tokens + step, max(step, 1)):
        seen = min(seen, tokens)
        due = options.quantized(seen, quantized)
        new = pages_of(due) - pages_of(quantized)
        for _ in range(batch):
            used += new
            pool = grown(pool, used - pool) if used > pool else pool
        if pages_of(due) > columns:
            columns = widened(pages_of(due))
        behind = pages_behind_window(options, seen, due)
        used -= batch * (behind - freed)
        quantized, freed = due, behind
    return pool, columns
