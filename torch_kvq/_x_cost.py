"""What attention over cached layer inputs costs, and where absorbing a weight is cheaper."""

from __future__ import annotations

from typing import NamedTuple


class Absorption(NamedTuple):
    """Whether keys and values are absorbed instead of rematerialised."""

    key: bool
    value: bool


def remat_flops(
    queries: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    key_channels: int,
    value_channels: int | None = None,
    *,
    absorb_key: bool = False,
    absorb_value: bool = False,
) -> int:
    """Floating-point operations of the matrix products of `remat_attention` for one row.

    A rematerialised key costs ``2 * channels * kv_heads * dim`` and a product of ``2 * dim`` with
    every query of every head; an absorbed one costs ``2 * channels`` for every query of every head,
    whose weight is applied to the query once. Values cost the same, applied to the result.

    Args:
        queries: new tokens.
        tokens: cached tokens that are attended to.
        heads: query heads.
        kv_heads: key and value heads.
        key_dim: channels of a key head.
        value_dim: channels of a value head.
        key_channels: channels of the cached input that keys are made of.
        value_channels: those of the values; the same input when not given.
        absorb_key: ``(q Wk) x`` instead of ``q (Wk x)``.
        absorb_value: ``Wv (p x)`` instead of ``p (Wv x)``.

    Example:
        >>> full = remat_flops(1, 2048, 32, 32, 128, 128, 4096)
        >>> absorbed = remat_flops(1, 2048, 32, 32, 128, 128, 4096, absorb_value=True)
        >>> round(full / absorbed, 2)
        1.98
    """
    rows = heads * queries
    value_channels = key_channels if value_channels is None else value_channels
    flops = 0
    for channels, dim, absorbed in (
        (key_channels, key_dim, absorb_key),
        (value_channels, value_dim, absorb_value),
    ):
        if absorbed:
            flops += 2 * rows * channels * (tokens + dim)
        else:
            flops += 2 * tokens * dim * (channels * kv_heads + rows)
    return flops


def choose_absorption(
    queries: int,
    tokens: int,
    heads: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
    key_channels: int,
    value_channels: int | None = None,
    *,
    positional_key: bool = True,
) -> Absorption:
    """The cheaper way of keys and of values by `remat_flops`.

    Args:
        queries: new tokens.
        tokens: cached tokens that are attended to.
        heads: query heads.
        kv_heads: key and value heads.
        key_dim: channels of a key head.
        value_dim: channels of a value head.
        key_channels: channels of the cached input that keys are made of.
        value_channels: those of the values; the same input when not given.
        positional_key: keys are normalised or rotated after their weight, so that it cannot be
            absorbed.

    Example:
        >>> choose_absorption(1, 2048, 12, 12, 64, 64, 768, positional_key=False)
        Absorption(key=True, value=True)
        >>> choose_absorption(512, 2048, 32, 32, 128, 128, 4096)
        Absorption(key=False, value=False)
    """
    shape = (queries, tokens, heads, kv_heads, key_dim, value_dim, key_channels, value_channels)
    plain = remat_flops(*shape)
    return Absorption(
        not positional_key and remat_flops(*shape, absorb_key=True) < plain,
        remat_flops(*shape, absorb_value=True) < plain,
    )
