"""Meaning of ``kvq::lut_attention``: float32 attention over the decoded state."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_kvq import _checks, formats
from torch_kvq.reference.decode import dequantize_tile

MASKED_BELOW = -8192.0
"""An additive mask value at or below this masks the key: its weight is zero beside any other."""


def lut_attention(
    query: Tensor,
    tiles: Tensor,
    block_table: Tensor,
    balance: Tensor,
    exact_key: Tensor,
    exact_value: Tensor,
    lengths: Tensor,
    attn_mask: Tensor | None = None,
    *,
    key_bits: int = 4,
    value_bits: int = 4,
    sink_tokens: int = 4,
    scale: float | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    precision: str = "exact",
) -> tuple[Tensor, Tensor]:
    """Attend to a packed layer, one row of the batch after the other.

    Args:
        query: ``[batch, heads, tokens, key_dim]``.
        tiles: uint8 ``[pages, kv_heads, record_bytes]``.
        block_table: int32 ``[batch, max_pages]``.
        balance: float32 ``[batch, kv_heads, key_dim]``.
        exact_key: ``[batch, kv_heads, capacity, key_dim]``.
        exact_value: ``[batch, kv_heads, capacity, value_dim]``.
        lengths: int32 ``[batch, 3]``.
        attn_mask: bool or float, ``[batch or 1, heads or 1, tokens or 1, positions]``.
        key_bits: bits of the keys.
        value_bits: bits of the values.
        sink_tokens: first tokens of a row in the exact buffer.
        scale: factor of the scores.
        is_causal: mask keys behind the query's position.
        sliding_window: positions a query attends to, its own included.
        softcap: bound of the scores.
        sinks: ``[heads]``, a logit per head without a value.
        precision: checked and ignored.

    Returns:
        ``[batch, heads, tokens, value_dim]`` in the query's dtype and the float32 log-sum-exp
        ``[batch, heads, tokens]``.
    """
    layout = _checks.check_state(
        tiles,
        block_table,
        balance,
        exact_key,
        exact_value,
        lengths,
        key_bits,
        value_bits,
        sink_tokens,
    )
    _checks.check_query(query, exact_key, attn_mask, sinks, sliding_window, softcap, precision)
    _checks.check_lengths(lengths, exact_key.shape[2], block_table.shape[1], sink_tokens)
    rows = lengths.tolist()
    if attn_mask is not None:
        _checks.check_columns(attn_mask, max((row[formats.LENGTH] for row in rows), default=0))
    pages = [
        _checks.check_pages(block_table, row, 0, -(-used // formats.TILE_TOKENS), tiles.shape[0])
        for row, (_, _, used) in enumerate(rows)
    ]
    out = query.new_empty((*query.shape[:3], exact_value.shape[3]))
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    for row, (start, length, quantized) in enumerate(rows):
        key, value = _gather_row(
            tiles[pages[row]],
            balance[row],
            exact_key[row],
            exact_value[row],
            max(length - start, 0),
            quantized,
            sink_tokens,
            layout,
        )
        query_position = torch.arange(query.shape[2], device=query.device) + (
            length - query.shape[2]
        )
        key_position = torch.arange(key.shape[1], device=query.device) + start
        allowed = allowed_keys(query_position, key_position, is_causal, sliding_window)
        mask = None if attn_mask is None else _mask_row(attn_mask, row, key_position)
        out[row], lse[row] = _attend(
            query[row].to(torch.float32), key, value, allowed, mask, scale, softcap, sinks
        )
    return out, lse


def _gather_row(
    tiles: Tensor,
    balance: Tensor,
    exact_key: Tensor,
    exact_value: Tensor,
    tokens: int,
    quantized: int,
    sink_tokens: int,
    layout: formats.TileFormat,
) -> tuple[Tensor, Tensor]:
    """Keys and values of a row in order, float32 ``[kv_heads, tokens, dim]``."""
    held = tokens - quantized
    key, value = exact_key[:, :held], exact_value[:, :held]
    if quantized == 0:
        return key.to(torch.float32), value.to(torch.float32)
    decoded = dequantize_tile(
        tiles,
        balance.unsqueeze(0),
        layout.key_bits,
        layout.value_bits,
        layout.value_dim,
        exact_key.dtype if layout.is_pass_through else torch.float32,
    )
    result = [
        torch.cat(
            (
                x[:, :sink_tokens].to(torch.float32),
                y.transpose(0, 1).flatten(1, 2)[:, :quantized].to(torch.float32),
                x[:, sink_tokens:].to(torch.float32),
            ),
            1,
        )
        for x, y in zip((key, value), decoded, strict=True)
    ]
    return result[0], result[1]


def allowed_keys(
    query_position: Tensor, key_position: Tensor, is_causal: bool, sliding_window: int | None
) -> Tensor:
    """Bool ``[queries, keys]`` by position."""
    distance = query_position.unsqueeze(1) - key_position
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if is_causal:
        allowed = allowed & (distance >= 0)
    if sliding_window is not None:
        allowed = allowed & (distance < sliding_window)
    return allowed


def _mask_row(attn_mask: Tensor, row: int, key_position: Tensor) -> Tensor:
    """Mask of one row, ``[heads or 1, queries or 1, keys]``."""
    mask = attn_mask[row if attn_mask.shape[0] > 1 else 0]
    return mask[..., key_position]


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of one row: query ``[heads, queries, dim]``, key ``[kv_heads, keys, dim]``."""
    score = masked_scores(query, key, allowed, mask, scale, softcap)
    return weigh_values(score, value, sinks)


def masked_scores(
    query: Tensor,
    key: Tensor,
    allowed: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Scores of one row, ``[heads, queries, keys]``, -inf where a key is masked.

    Args:
        query: ``[heads, queries, dim]``.
        key: ``[kv_heads, keys, dim]``.
        allowed: bool, broadcast to the scores.
        mask: bool or additive, broadcast to the scores.
        scale: factor of the scores.
        softcap: bound of the scores.
    """
    score = query @ key.repeat_interleave(query.shape[0] // key.shape[0], 0).mT * scale
    return mask_scores(score, allowed, mask, softcap)


def mask_scores(
    score: Tensor, allowed: Tensor, mask: Tensor | None, softcap: float | None
) -> Tensor:
    """Softcap and masks of scaled scores; see `masked_scores`."""
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        mask = mask.to(torch.float32)
        allowed = allowed & (mask > MASKED_BELOW)
        score = score + mask
    return score.masked_fill(~allowed, -torch.inf)


def weigh_values(score: Tensor, value: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Softmax over `masked_scores` and the weighted sum of the values ``[kv_heads, keys, dim]``.

    Returns:
        Output ``[heads, queries, dim]`` and log-sum-exp ``[heads, queries]``.
    """
    value = value.repeat_interleave(score.shape[0] // value.shape[0], 0)
    extra = score.new_full((*score.shape[:2], 1), -torch.inf)
    if sinks is not None:
        extra = sinks.to(torch.float32).view(-1, 1, 1).expand(extra.shape)
    lse = torch.cat((score, extra), -1).logsumexp(-1)
    allowed = score != -torch.inf
    weights = (score - lse.unsqueeze(-1)).exp().masked_fill(~allowed, 0.0)
    return weighted_sum(weights, value, allowed), lse


def weighted_sum(weights: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Weighted sum of values in which a masked NaN or infinity has no part."""
    # One pass tells nearly always that there are none: a sum takes over what is not finite.
    if torch.isfinite(value.sum()):
        return weights @ value
    broken = ~torch.isfinite(value)
    reached = allowed.to(torch.float32) @ broken.to(torch.float32)
    return (weights @ value.masked_fill(broken, 0.0)).masked_fill(reached > 0, torch.nan)
