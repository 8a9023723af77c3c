"""Meaning of ``kvq::tiered_attention``: float32 attention over near and decoded far tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_kvq import _checks, _tier_checks, formats
from torch_kvq.reference.decode import dequantize_tile
from torch_kvq.reference.far import dequantize_far
from torch_kvq.reference.lut_attention import allowed_keys, masked_scores, weigh_values

PASS_ROWS = 16
"""Queries of a KV head, its heads one after the other, that share one reading of a value."""


class Row(NamedTuple):
    """Far tokens of one sequence and, behind them, its near slots."""

    key: Tensor  # float32 [kv_heads, keys, key_dim]
    value: Tensor  # float32 [kv_heads, keys, value_dim]
    token: Tensor  # int64 [kv_heads, keys]
    counts: Tensor  # bool [kv_heads, keys]: neither promoted nor an empty slot
    far: int  # far tokens


def tiered_attention(
    query: Tensor,
    near_key: Tensor,
    near_value: Tensor,
    near_index: Tensor,
    near_count: Tensor,
    tiles: Tensor,
    block_table: Tensor,
    promoted: Tensor,
    lengths: Tensor,
    attn_mask: Tensor | None = None,
    *,
    balance: Tensor | None = None,
    far: str = "fp8-int4",
    sink_tokens: int = 4,
    candidates: int = 8,
    scale: float | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    precision: str = "exact",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Attend to near and far tokens, one row of the batch after the other.

    Args:
        query: ``[batch, heads, tokens, key_dim]``.
        near_key: ``[batch, kv_heads, capacity, key_dim]``.
        near_value: ``[batch, kv_heads, capacity, value_dim]``.
        near_index: int32 ``[batch, kv_heads, capacity]``, -1 in an empty slot.
        near_count: int32 ``[batch, kv_heads]``.
        tiles: uint8 ``[pages, kv_heads, record_bytes]``.
        block_table: int32 ``[batch, max_pages]``.
        promoted: int64 ``[batch, kv_heads, max_pages]``.
        lengths: int32 ``[batch, 3]``.
        attn_mask: bool or float, ``[batch or 1, heads or 1, tokens or 1, positions]``.
        balance: float32 ``[batch, kv_heads, key_dim]``, with ``"tile4"``.
        far: ``"fp8-int4"`` or ``"tile4"``.
        sink_tokens: tokens before the first far one.
        candidates: far tokens to return.
        scale: factor of the scores.
        is_causal: mask keys behind the query's position.
        sliding_window: positions a query attends to, its own included.
        softcap: bound of the scores.
        sinks: ``[heads]``, a logit per head without a value.
        precision: checked and ignored.

    Returns:
        out, lse, candidate index and score, near score, skipped values.
    """
    _tier_checks.check_tiers(
        near_key,
        near_value,
        near_index,
        near_count,
        tiles,
        block_table,
        promoted,
        lengths,
        balance,
        far,
        sink_tokens,
        candidates,
    )
    _checks.check_query(query, near_key, attn_mask, sinks, sliding_window, softcap, precision)
    _tier_checks.check_near(
        near_index, near_count, promoted, lengths, block_table.shape[1], sink_tokens
    )
    rows = lengths.tolist()
    if attn_mask is not None:
        _checks.check_columns(attn_mask, max((row[formats.LENGTH] for row in rows), default=0))
    pages = [
        _checks.check_pages(block_table, row, 0, -(-used // formats.TILE_TOKENS), tiles.shape[0])
        for row, (_, _, used) in enumerate(rows)
    ]
    batch, kv_heads, capacity, key_dim = near_key.shape
    out = query.new_empty((*query.shape[:3], near_value.shape[3]))
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    best_index = lengths.new_full((batch, kv_heads, candidates), -1)
    best_score = lse.new_full((batch, kv_heads, candidates), -torch.inf)
    near_score = lse.new_full((batch, kv_heads, capacity if candidates else 0), -torch.inf)
    skipped = lengths.new_zeros((batch, kv_heads))
    scale = key_dim**-0.5 if scale is None else scale
    for b, (start, length, quantized) in enumerate(rows):
        row = _gather_row(
            near_key[b],
            near_value[b],
            near_index[b],
            near_count[b],
            tiles[pages[b]],
            promoted[b],
            None if balance is None else balance[b : b + 1],
            quantized,
            sink_tokens,
        )
        score = _row_scores(
            row,
            query[b].to(torch.float32),
            None if attn_mask is None else attn_mask[b if attn_mask.shape[0] > 1 else 0],
            start,
            length,
            (scale, is_causal, sliding_window, softcap),
        )
        out[b], lse[b] = weigh_values(score, row.value, sinks)
        skipped[b] = _count_skipped(score, kv_heads, row.far)
        if candidates:
            weight = _greatest_weight(score, lse[b], kv_heads)
            best_index[b], best_score[b] = _best(weight[:, : row.far], candidates, sink_tokens)
            near_score[b] = weight[:, row.far :]
    return out, lse, best_index, best_score, near_score, skipped


def _gather_row(
    near_key: Tensor,
    near_value: Tensor,
    near_index: Tensor,
    near_count: Tensor,
    tiles: Tensor,
    promoted: Tensor,
    balance: Tensor | None,
    quantized: int,
    sink_tokens: int,
) -> Row:
    key_dim, value_dim = near_key.shape[-1], near_value.shape[-1]
    if balance is None:
        decoded = dequantize_far(tiles, key_dim, value_dim)
    else:
        decoded = dequantize_tile(tiles, balance, 4, 4, value_dim)
    far_key, far_value = (x.transpose(0, 1).flatten(1, 2)[:, :quantized] for x in decoded)
    kv_heads, capacity = near_index.shape
    slot = torch.arange(capacity, device=near_index.device)
    filled = (near_index >= 0) & (slot < near_count.unsqueeze(-1))
    far_token = torch.arange(quantized, device=near_index.device) + sink_tokens
    return Row(
        torch.cat((far_key, near_key.to(torch.float32)), 1),
        torch.cat((far_value, near_value.to(torch.float32)), 1),
        torch.cat((far_token.expand(kv_heads, -1), near_index.where(filled, 0)), 1).long(),
        torch.cat((~_tier_checks.promoted_bits(promoted, quantized), filled), 1),
        quantized,
    )


def _row_scores(
    row: Row,
    query: Tensor,
    mask: Tensor | None,
    start: int,
    length: int,
    options: tuple[float, bool, int | None, float | None],
) -> Tensor:
    """Scores ``[heads, queries, keys]`` of a row, -inf where a key does not count."""
    scale, is_causal, sliding_window, softcap = options
    heads, queries, _ = query.shape
    kv_heads, keys = row.token.shape
    position = row.token + start
    query_position = torch.arange(queries, device=query.device) + (length - queries)
    seen = [allowed_keys(query_position, p, is_causal, sliding_window) for p in position]
    allowed = (torch.stack(seen) & row.counts.unsqueeze(1)).repeat_interleave(heads // kv_heads, 0)
    if mask is not None:
        column = position.repeat_interleave(heads // kv_heads, 0).unsqueeze(1)
        column = column.clamp(max=max(mask.shape[-1] - 1, 0)).expand(heads, queries, keys)
        mask = mask.expand(heads, queries, -1).gather(2, column) if mask.shape[-1] else None
    return masked_scores(query, row.key, allowed, mask, scale, softcap)


def _greatest_weight(score: Tensor, lse: Tensor, kv_heads: int) -> Tensor:
    """Greatest log weight of each key among the queries of its KV head, ``[kv_heads, keys]``."""
    weight = (score - lse.unsqueeze(-1)).masked_fill(score == -torch.inf, -torch.inf)
    weight = weight.masked_fill(weight.isnan(), -torch.inf).unflatten(0, (kv_heads, -1))
    if 0 in weight.shape[1:3]:
        return weight.new_full((kv_heads, weight.shape[3]), -torch.inf)
    return weight.amax((1, 2))


def _best(weight: Tensor, candidates: int, sink_tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens of greatest weight, the first of equals first; -1 and -inf where there are none."""
    order = weight.sort(dim=-1, descending=True, stable=True).indices[:, :candidates]
    score = weight.gather(1, order)
    index = (order + sink_tokens).masked_fill(score == -torch.inf, -1)
    missing = (0, candidates - order.shape[1])
    return (
        torch.nn.functional.pad(index, missing, value=-1),
        torch.nn.functional.pad(score, missing, value=-torch.inf),
    )


def _count_skipped(score: Tensor, kv_heads: int, far: int) -> Tensor:
    """Far values that no query of a pass needs, ``[kv_heads]``."""
    below = (
        score < score.amax(-1, keepdim=True) - formats.SKIPPED_BELOW if score.shape[-1] else score
    )
    rows = below[..., :far].unflatten(0, (kv_heads, -1)).transpose(1, 2).flatten(1, 2)
    seen = (
        (score[..., :far] != -torch.inf).unflatten(0, (kv_heads, -1)).transpose(1, 2).flatten(1, 2)
    )
    passes = zip(rows.split(PASS_ROWS, 1), seen.split(PASS_ROWS, 1), strict=True)
    counts = [(part.all(1) & some.any(1)).sum(-1) for part, some in passes]
    return torch.stack(counts).sum(0) if counts else score.new_zeros(kv_heads)
