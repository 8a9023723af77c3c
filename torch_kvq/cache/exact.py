"""Whole keys and values of a layer: attention before anything is packed, and decoding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_kvq import _checks
from torch_kvq.cache.pages import FREED
from torch_kvq.cache.room import pages_of
from torch_kvq.cache.state import LayerState
from torch_kvq.formats import TILE_TOKENS, TileFormat


def attend_exact(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    precision: str = "exact",
) -> Tensor:
    """Attention over keys and values that are not in a layer.

    With a sliding window, a soft cap or sinks it has no gradients.

    Args:
        query: ``[batch, heads, queries, key_dim]``; the last query belongs to the last token.
        key: ``[batch, kv_heads, tokens, key_dim]``.
        value: ``[batch, kv_heads, tokens, value_dim]``.
        attn_mask: bool or additive, ``[batch or 1, heads or 1, queries or 1, tokens or more]``.
        scale: as in `torch_kvq.lut_attention`, like the other options.
        is_causal: mask keys behind the query's position.
        sliding_window: positions a query attends to.
        softcap: bound of the scores.
        sinks: ``[heads]``, a logit per head without a value.
        precision: ``"exact"`` or ``"fast"``.

    Returns:
        ``[batch, heads, queries, value_dim]``.
    """
    tokens = key.shape[2]
    _checks.check_query(query, key, attn_mask, sinks, sliding_window, softcap, precision)
    if attn_mask is not None:
        _checks.check_columns(attn_mask, tokens)
        attn_mask = attn_mask[..., :tokens]
    is_plain = sliding_window is None and softcap is None and sinks is None
    is_aligned = not is_causal or (attn_mask is None and query.shape[2] == tokens)
    if is_plain and is_aligned and query.dtype == key.dtype:
        if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32):
            attn_mask = attn_mask.to(query.dtype)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    out, _ = torch.ops.kvq.lut_attention(
        query.detach(),
        *_unpacked_state(key, value),
        attn_mask,
        scale=scale,
        is_causal=is_causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=None if sinks is None else sinks.detach(),
        precision=precision,
    )
    return out


def _unpacked_state(key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """State of a layer whose exact buffers are these keys and values and which has no tiles."""
    batch, kv_heads, tokens, key_dim = key.shape
    layout = TileFormat(key_dim, value.shape[3], 4, 4)
    return (
        key.new_empty((0, kv_heads, layout.record_bytes), dtype=torch.uint8),
        key.new_empty((batch, 0), dtype=torch.int32),
        key.new_empty((batch, kv_heads, key_dim), dtype=torch.float32),
        key.contiguous(),
        value.contiguous(),
        key.new_tensor([[0, tokens, 0]], dtype=torch.int32).repeat(batch, 1),
    )


def decode(state: LayerState, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values by position, zero in left padding and behind the last token.

    Args:
        state: the state of the layer.
        length: positions to return.

    Returns:
        ``[batch, kv_heads, length, key_dim]`` and ``[batch, kv_heads, length, value_dim]``.
    """
    batch, kv_heads = state.exact_key.shape[:2]
    key = state.exact_key.new_zeros((batch, kv_heads, length, state.layout.key_dim))
    value = state.exact_value.new_zeros((batch, kv_heads, length, state.layout.value_dim))
    for row, (start, end, quantized) in enumerate(state.lengths.tolist()):
        tokens = max(min(end, length) - start, 0)
        for out, whole in zip((key, value), _decode_row(state, row, quantized), strict=True):
            out[row, :, start : start + tokens] = whole[:, :tokens]
    return key, value


def _decode_row(state: LayerState, row: int, quantized: int) -> tuple[Tensor, Tensor]:
    """Tokens of one row in order, ``[kv_heads, tokens and free slots, dim]``."""
    exact = (state.exact_key[row], state.exact_value[row])
    if not quantized:
        return exact
    pages = state.table.rows[row][: pages_of(quantized)]
    freed = pages.count(FREED)
    tiles = torch.ops.kvq.dequantize_tile(
        state.table.pool.tiles[pages[freed:]],
        state.balance[row : row + 1],
        state.options.key_bits,
        state.options.value_bits,
        state.layout.value_dim,
        state.exact_key.dtype,
    )
    sinks = state.options.sink_tokens
    key, value = (
        torch.cat(
            (whole[:, :sinks], _joined(tile, freed)[:, :quantized], whole[:, sinks:]),
            1,
        )
        for whole, tile in zip(exact, tiles, strict=True)
    )
    return key, value


def _joined(tiles: Tensor, freed: int) -> Tensor:
    """Tiles ``[n, kv_heads, 64, dim]`` as tokens, zero for those of ``freed`` pages before them."""
    tokens = tiles.transpose(0, 1).flatten(1, 2)
    return F.pad(tokens, (0, 0, freed * TILE_TOKENS, 0))
