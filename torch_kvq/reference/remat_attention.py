"""Meaning of ``kvq::remat_attention``, and what runs on every device.

Attention goes through the cached inputs block by block with a running softmax, so that keys and
values never exist all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_kvq import _checks, _x_checks
from torch_kvq._x_cost import choose_absorption
from torch_kvq.formats import PASS_THROUGH_BITS
from torch_kvq.reference.lut_attention import allowed_keys, mask_scores, weighted_sum
from torch_kvq.reference.remat import BLOCK_TOKENS, Scratch, Source, Weights, product_dtype


class _Softmax:
    """Running softmax of the queries of a row and the sum of what they attend to."""

    def __init__(self, like: Tensor, width: int) -> None:
        self.max = like.new_full(like.shape[:2], -torch.inf, dtype=torch.float32)
        self.mass = like.new_zeros(like.shape[:2], dtype=torch.float32)
        self.sum = like.new_zeros((*like.shape[:2], width), dtype=torch.float32)

    def add(self, score: Tensor, value: Tensor, finite: bool) -> None:
        """Attend to ``value`` ``[heads or 1, keys, width]`` by `mask_scores`."""
        heads, queries, _ = score.shape
        largest = torch.maximum(self.max, score.amax(-1))
        some = largest.masked_fill(largest == -torch.inf, 0.0)
        weights = (score - some.unsqueeze(-1)).exp_()
        shrink = (self.max - some).exp()
        grouped = (value.shape[0], heads // value.shape[0] * queries, -1)
        if finite:
            added = torch.bmm(weights.view(grouped), value)
        else:
            added = weighted_sum(weights.view(grouped), value, (score != -torch.inf).view(grouped))
        self.sum.mul_(shrink.unsqueeze(-1)).add_(added.view(heads, queries, -1))
        self.mass.mul_(shrink).add_(weights.sum(-1))
        self.max = largest

    def finish(self, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Weighted sums, the share of the weights that is not the sinks', and the log-sum-exp."""
        lse = self.max + self.mass.log()
        lse = lse.masked_fill(self.mass == 0, -torch.inf)
        total = lse
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(torch.float32).unsqueeze(-1).expand_as(lse))
        share = (lse - total).exp().masked_fill(lse == -torch.inf, 0.0)
        factor = (self.max - total).exp().masked_fill(lse == -torch.inf, 0.0)
        return self.sum * factor.unsqueeze(-1), share, total


class _Call(NamedTuple):
    """What is the same for all rows of an attention call."""

    source: Source
    value_source: Source | None
    weights: Weights
    scale: float
    is_causal: bool
    sliding_window: int | None
    softcap: float | None
    absorb_key: bool | None
    absorb_value: bool | None

    @property
    def finite(self) -> bool:
        """Whether records decode to finite numbers: raw ones hold what they were given."""
        bits = (*self.source.bits, *(self.value_source.bits if self.value_source else ()))
        return PASS_THROUGH_BITS not in bits


def _blocks(
    call: _Call, row: int, quantized: int, tokens: int, needed: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """First token, key input and value input of the blocks with tokens from ``needed`` on."""
    dtype = call.weights.key.dtype
    for first in range(needed // BLOCK_TOKENS * BLOCK_TOKENS, quantized, BLOCK_TOKENS):
        end = min(first + BLOCK_TOKENS, quantized)
        x = call.source.read(row, first, end, dtype)
        y = x if call.value_source is None else call.value_source.read(row, first, end, dtype)
        yield first, x, y
    for first in range(quantized, tokens, BLOCK_TOKENS):
        held = slice(first - quantized, min(first + BLOCK_TOKENS, tokens) - quantized)
        assert call.source.exact is not None
        x = y = call.source.exact[row, held].to(dtype)
        if call.value_source is not None and call.value_source.exact is not None:
            y = call.value_source.exact[row, held].to(dtype)
        yield first, x, y


def _attend_row(
    call: _Call, query: Tensor, mask: Tensor | None, sinks: Tensor | None, row: int,
    start: int, length: int, quantized: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of one row: query ``[heads, queries, key_dim]``, float32."""
    weights, sizes = call.weights, call.weights.sizes
    heads, queries, _ = query.shape
    tokens = max(length - start, 0)
    first_query = length - queries
    needed = 0
    if call.sliding_window is not None:
        needed = min(max(first_query - call.sliding_window + 1 - start, 0), tokens)
    chosen = choose_absorption(
        queries,
        tokens - needed,
        heads,
        *sizes,
        positional_key=weights.key_norm is not None or weights.cos is not None,
    )
    absorb_key = chosen.key if call.absorb_key is None else call.absorb_key
    absorb_value = chosen.value if call.absorb_value is None else call.absorb_value
    group = (sizes.kv_heads, heads // sizes.kv_heads * queries)
    offset: Tensor | float = 0.0
    if absorb_key:
        left, offset = _absorb_key(query, weights)
        left = left.reshape(1, heads * queries, -1)
    else:
        left = query.reshape(*group, -1)
    softmax = _Softmax(query, sizes.value_channels if absorb_value else sizes.value_dim)
    query_position = torch.arange(queries, device=query.device) + first_query
    for first, x, y in _blocks(call, row, quantized, tokens, needed):
        wide = weights.widen(x) if absorb_key or (absorb_value and y is x) else x
        right = wide.unsqueeze(0) if absorb_key else weights.keys(x, row, first)
        score = torch.bmm(left, right.mT).view(heads, queries, -1) + offset
        position = torch.arange(first, first + x.shape[0], device=query.device) + start
        allowed = allowed_keys(query_position, position, call.is_causal, call.sliding_window)
        part = None if mask is None else mask[..., position]
        score = mask_scores(score * call.scale, allowed, part, call.softcap)
        if absorb_value:
            value = (wide if y is x else weights.widen(y)).unsqueeze(0)
        else:
            value = weights.values(y)
        softmax.add(score, value, finite=first < quantized and call.finite)
    out, share, lse = softmax.finish(sinks)
    if absorb_value:
        weight = weights.value.float().unflatten(0, (sizes.kv_heads, -1))
        out = torch.bmm(out.reshape(*group, -1), weight.mT).view(heads, queries, -1)
        if weights.value_bias is not None:
            bias = weights.value_bias.float().view(sizes.kv_heads, 1, -1)
            bias = bias.repeat_interleave(heads // sizes.kv_heads, 0)
            out = out + share.unsqueeze(-1) * bias
    return out, lse


def _absorb_key(query: Tensor, weights: Weights) -> tuple[Tensor, Tensor | float]:
    """Queries against cached inputs, ``[heads, queries, channels]``, and what the bias adds."""
    kv_heads = weights.sizes.kv_heads
    heads, queries, _ = query.shape
    grouped = query.reshape(kv_heads, heads // kv_heads * queries, -1)
    left = torch.bmm(grouped, weights.key.float().unflatten(0, (kv_heads, -1)))
    left = left.view(heads, queries, -1)
    if weights.key_bias is None:
        return left, 0.0
    bias = weights.key_bias.float().view(kv_heads, -1, 1)
    return left, (grouped @ bias).view(heads, queries, 1)


@torch.no_grad()
def remat_attention(
    query: Tensor,
    records: Sequence[Tensor],
    value_records: Sequence[Tensor],
    exact: Tensor,
    value_exact: Tensor | None,
    lengths: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    key_norm: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    attn_mask: Tensor | None = None,
    *,
    bits: Sequence[int],
    value_bits: Sequence[int] = (),
    kv_heads: int,
    axis: str = "token",
    value_axis: str = "token",
    rotate: bool = True,
    norm_eps: float = 1e-6,
    scale: float | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    absorb_key: bool | None = None,
    absorb_value: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to cached inputs, row by row; the arguments are those of the wrapper.

    Args:
        query: ``[batch, heads, tokens, key_dim]``.
        records: see `remat_kv`.
        value_records: see `remat_kv`.
        exact: ``[batch, capacity, channels]``.
        value_exact: ``[batch, capacity, value_channels]`` beside value records.
        lengths: int32 ``[batch, 3]``.
        key_weight: see `remat_kv`.
        value_weight: see `remat_kv`.
        key_bias: see `remat_kv`.
        value_bias: see `remat_kv`.
        key_norm: see `remat_kv`.
        cos: ``[batch or 1, tokens, rotary_dim]``.
        sin: the same.
        attn_mask: bool or float, ``[batch or 1, heads or 1, tokens or 1, positions]``.
        bits: see `remat_kv`.
        value_bits: see `remat_kv`.
        kv_heads: key and value heads.
        axis: axis of the records.
        value_axis: axis of the value records.
        rotate: rotate back.
        norm_eps: added to the variance.
        scale: factor of the scores.
        is_causal: mask keys behind the query's position.
        sliding_window: positions a query attends to, its own included.
        softcap: bound of the scores.
        sinks: ``[heads]``, a logit per head without a value.
        absorb_key: multiply queries, not inputs, by the key weight.
        absorb_value: multiply results, not inputs, by the value weight.

    Returns:
        ``[batch, heads, tokens, value_dim]`` in the query's dtype and the float32 log-sum-exp.
    """
    sizes = _x_checks.check_remat_attention(
        query, records, value_records, exact, value_exact, lengths, key_weight, value_weight,
        key_bias, value_bias, key_norm, cos, sin, attn_mask, bits, value_bits, kv_heads, axis,
        value_axis, norm_eps, sliding_window, softcap, sinks, absorb_key,
    )  # fmt: skip
    rows = lengths.tolist()
    _checks.check_lengths(lengths, exact.shape[1], records[0].shape[1], 0)
    longest = max((length for _, length, _ in rows), default=0)
    if attn_mask is not None:
        _checks.check_columns(attn_mask, longest)
    _x_checks.check_tokens(cos, max((max(n - start, 0) for start, n, _ in rows), default=0))
    dtype = product_dtype(key_weight)
    call = _Call(
        Source(records, bits, axis, rotate, sizes.key_channels, key_weight.dtype, exact),
        Source(
            value_records,
            value_bits,
            value_axis,
            rotate,
            sizes.value_channels,
            key_weight.dtype,
            value_exact,
        )  # fmt: skip
        if value_records
        else None,
        Weights(
            key_weight.to(dtype),
            value_weight.to(dtype),
            key_bias,
            value_bias,
            key_norm,
            norm_eps,
            cos,
            sin,
            sizes,
            Scratch(),
        ),
        query.shape[3] ** -0.5 if scale is None else scale,
        is_causal,
        sliding_window,
        softcap,
        absorb_key,
        absorb_value,
    )
    out = query.new_empty((*query.shape[:3], sizes.value_dim))
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    for row, state in enumerate(rows):
        mask = None if attn_mask is None else attn_mask[row if attn_mask.shape[0] > 1 else 0]
        out[row], lse[row] = _attend_row(
            call, query[row].to(torch.float32), mask, sinks, row, *state
        )
    return out, lse
