"""Meaning of ``kvq::attention_mass``: how much of the attention of some queries a key draws."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_kvq import _checks
from torch_kvq.reference.lut_attention import allowed_keys, masked_scores


def attention_mass(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean and greatest attention weight of every key, one KV head after the other.

    Args:
        query: ``[batch, heads, queries, key_dim]``.
        key: ``[batch, kv_heads, tokens, key_dim]``.
        attn_mask: bool or float, ``[batch or 1, heads or 1, queries or 1, tokens or more]``.
        scale: factor of the scores.
        is_causal: mask keys behind the query's position.
        sliding_window: positions a query attends to, its own included.
        softcap: bound of the scores.
        sinks: ``[heads]``, a logit per head without a value.

    Returns:
        Mean weights and greatest log weights, float32 ``[batch, kv_heads, tokens]`` each.
    """
    _checks.check_rank(4, key=key)
    _checks.check_float(key=key)
    _checks.check_query(query, key, attn_mask, sinks, sliding_window, softcap, "exact")
    batch, kv_heads, tokens, key_dim = key.shape
    heads, queries = query.shape[1:3]
    if attn_mask is not None:
        _checks.check_columns(attn_mask, tokens)
        attn_mask = attn_mask[..., :tokens].expand(batch, heads, -1, -1)
    scale = key_dim**-0.5 if scale is None else scale
    position = torch.arange(tokens, device=key.device)
    query_position = torch.arange(queries, device=key.device) + (tokens - queries)
    allowed = allowed_keys(query_position, position, is_causal, sliding_window)
    mass = key.new_zeros((batch, kv_heads, tokens), dtype=torch.float32)
    greatest = torch.full_like(mass, -torch.inf)
    group = heads // kv_heads
    for row in range(batch):
        for head in range(kv_heads if group * queries else 0):
            members = slice(head * group, (head + 1) * group)
            score = masked_scores(
                query[row, members].to(torch.float32),
                key[row, head : head + 1].to(torch.float32),
                allowed,
                None if attn_mask is None else attn_mask[row, members],
                scale,
                softcap,
            )
            extra = score.new_full((group, queries, 1), -torch.inf)
            if sinks is not None:
                extra = sinks[members].to(torch.float32).view(-1, 1, 1).expand(extra.shape)
            weight = torch.cat((score, extra), -1).softmax(-1)[..., :tokens]
            # A query that attends to nothing has weights of 0 / 0.
            weight = weight.masked_fill(score == -torch.inf, 0.0)
            mass[row, head] = weight.mean((0, 1))
            greatest[row, head] = weight.amax((0, 1)).log()
    return mass, greatest
