"""The operators of two-tier layers: schema, fake kernel, reference and typed wrapper of each."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_kvq import _checks, _tier_checks, reference
from torch_kvq._ops import define
from torch_kvq.formats import TILE_TOKENS


def _quantize_far_fake(key: Tensor, value: Tensor) -> Tensor:
    layout = _checks.check_far_input(key, value)
    return key.new_empty((key.shape[0], key.shape[1], layout.record_bytes), dtype=torch.uint8)


define(
    "quantize_far(Tensor key, Tensor value) -> Tensor", reference.quantize_far, _quantize_far_fake
)


def quantize_far(key: Tensor, value: Tensor) -> Tensor:
    """Encode tiles of 64 tokens into far records: fp8 keys, int4 values.

    Every token has its own scales, so a record holds the same codes whatever its other tokens are
    (docs/formats.md, "Far record"). NaN is stored as 0, infinities as the largest float16.

    Args:
        key: ``[tiles, kv_heads, 64, key_dim]``, float32, float16 or bfloat16.
        value: ``[tiles, kv_heads, 64, value_dim]`` in the same dtype.

    Returns:
        Records, uint8 ``[tiles, kv_heads, record_bytes]``.

    Raises:
        ValueError: dims, dtypes or shapes outside the above.

    Example:
        >>> key, value = torch.randn(2, 5, 3, 64, 128)
        >>> quantize_far(key, value).shape
        torch.Size([5, 3, 12672])
    """
    return torch.ops.kvq.quantize_far(key, value)


def _dequantize_far_fake(
    tiles: Tensor, key_dim: int, value_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    _checks.check_far_records(tiles, key_dim, value_dim, dtype)
    shape = (tiles.shape[0], tiles.shape[1], TILE_TOKENS)
    key = tiles.new_empty((*shape, key_dim), dtype=dtype)
    return key, tiles.new_empty((*shape, value_dim), dtype=dtype)


define(
    "dequantize_far(Tensor tiles, int key_dim, int value_dim, ScalarType dtype=float32) "
    "-> (Tensor, Tensor)",
    reference.dequantize_far,
    _dequantize_far_fake,
)


def dequantize_far(
    tiles: Tensor, key_dim: int, value_dim: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Decode far records into keys and values, the inverse of `quantize_far`.

    Args:
        tiles: records, uint8 ``[tiles, kv_heads, record_bytes]``.
        key_dim: channels of the keys.
        value_dim: channels of the values; those of the keys when not given.
        dtype: dtype of the result.

    Returns:
        ``(key, value)``: ``[tiles, kv_heads, 64, key_dim]`` and
        ``[tiles, kv_heads, 64, value_dim]``.

    Raises:
        ValueError: dims, dtypes or shapes that do not match the records.

    Example:
        >>> key, value = torch.randn(2, 5, 3, 64, 128)
        >>> decoded, _ = dequantize_far(quantize_far(key, value), 128)
        >>> bool((decoded - key).norm() / key.norm() < 0.03)
        True
    """
    dim = key_dim if value_dim is None else value_dim
    return torch.ops.kvq.dequantize_far(tiles, key_dim, dim, dtype)


def _tiered_attention_fake(
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
    shape, owners = query.shape[:3], near_key.shape[:2]
    near = near_key.shape[2] if candidates else 0
    return (
        query.new_empty((*shape, near_value.shape[-1])),
        query.new_empty(shape, dtype=torch.float32),
        query.new_empty((*owners, candidates), dtype=torch.int32),
        query.new_empty((*owners, candidates), dtype=torch.float32),
        query.new_empty((*owners, near), dtype=torch.float32),
        query.new_empty(owners, dtype=torch.int32),
    )


define(
    "tiered_attention(Tensor query, Tensor near_key, Tensor near_value, Tensor near_index, "
    "Tensor near_count, Tensor tiles, Tensor block_table, Tensor promoted, Tensor lengths, "
    "Tensor? attn_mask=None, *, Tensor? balance=None, str far='fp8-int4', int sink_tokens=4, "
    "int candidates=8, float? scale=None, bool is_causal=False, SymInt? sliding_window=None, "
    "float? softcap=None, Tensor? sinks=None, str precision='exact') "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference.tiered_attention,
    _tiered_attention_fake,
)


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
    """Attention over exact near tokens and compressed far tokens, each counted once.

    The state (near_key to lengths) is described in docs/formats.md, "State of a tiered layer".
    Tokens of a row are numbered from 0 behind its padding: token t stands at position
    ``start + t``, and query i of T at position ``length - T + i``. Far tokens are ``sink_tokens``
    to ``sink_tokens + quantized - 1``; near ones are those that ``near_index`` names, in any
    order. A token that is both has its bit in ``promoted`` set, which takes its far copy out of
    the attention.

    With ``"fp8-int4"`` the kernels score in float32, with ``"tile4"`` in integers as
    `lut_attention` does. Either way they stay within its budgets of float arithmetic on the same
    codes. ``precision`` has a meaning for ``"tile4"`` alone.

    Args:
        query: ``[batch, heads, tokens, key_dim]``, float32, float16 or bfloat16; heads a multiple
            of the KV heads.
        near_key: ``[batch, kv_heads, capacity, key_dim]``, float32, float16 or bfloat16.
        near_value: ``[batch, kv_heads, capacity, value_dim]`` in the same dtype.
        near_index: int32 ``[batch, kv_heads, capacity]``: the token in a slot, -1 if it is empty.
        near_count: int32 ``[batch, kv_heads]``: slots in use; those behind are not read.
        tiles: records, uint8 ``[pages, kv_heads, record_bytes]``, of `quantize_far` or of
            `quantize_tile` at 4 bits.
        block_table: int32 ``[batch, max_pages]``.
        promoted: int64 ``[batch, kv_heads, max_pages]``: bit j for token j of a tile.
        lengths: int32 ``[batch, 3]``: start, length, quantized.
        attn_mask: bool (True = attend) or additive float, broadcastable to
            ``[batch, heads, tokens, positions]``; at least as many columns as positions. An
            additive value of -8192 or less masks the key.
        balance: float32 ``[batch, kv_heads, key_dim]``, for ``"tile4"``.
        far: format of the far tier, ``"fp8-int4"`` or ``"tile4"``.
        sink_tokens: tokens of a row before its first far one.
        candidates: far tokens to return for each KV head, up to 64; with 0 no near score either.
        scale: factor of the scores, ``key_dim ** -0.5`` when not given.
        is_causal: mask keys behind the query's position.
        sliding_window: attend only to the last so many positions, the query's own included.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the mask.
        sinks: ``[heads]``, a logit per head that joins the softmax without a value.
        precision: ``"exact"`` or ``"fast"``.

    Returns:
        ``(out, lse, candidate_index, candidate_score, near_score, skipped)``:

        * out: ``[batch, heads, tokens, value_dim]`` in the query's dtype.
        * lse: float32 ``[batch, heads, tokens]``, natural logarithm, ``sinks`` included.
        * candidate_index: int32 ``[batch, kv_heads, candidates]``, the far tokens with the
          greatest weight, greatest first, the smaller token first among equals; promoted and
          masked tokens are none, and -1 stands where there are too few.
        * candidate_score: float32, their log weights (score minus lse, at most 0), the greatest
          among the queries of the KV head; -inf beside a -1.
        * near_score: float32 ``[batch, kv_heads, capacity]``, the same of the token in each near
          slot, -inf in empty ones; ``[batch, kv_heads, 0]`` without candidates.
        * skipped: int32 ``[batch, kv_heads]``, far tokens that are attended to but whose values
          were not read: no query needed them, their weights being below exp(-16) of the greatest
          so far. Such tokens stay in the denominator. Up to 16 queries of a KV head (its heads
          times the positions) share a reading, and each such pass is counted. Kernels leave out
          8 tokens at a time, or a tile of ``"tile4"``, so they count fewer than the reference,
          which counts tokens by the final weights.

    Raises:
        IndexError: lengths, pages, counts or near tokens outside their buffers.
        ValueError: shapes, dtypes or options outside the above, a mask with too few columns, a
            token that would count twice, a promoted one that is not near.
    """
    return torch.ops.kvq.tiered_attention(
        query,
        near_key,
        near_value,
        near_index,
        near_count,
        tiles,
        block_table,
        promoted,
        lengths,
        attn_mask,
        balance=balance,
        far=far,
        sink_tokens=sink_tokens,
        candidates=candidates,
        scale=scale,
        is_causal=is_causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        precision=precision,
    )


def _attention_mass_fake(
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
    _checks.check_rank(4, key=key)
    _checks.check_float(key=key)
    _checks.check_query(query, key, attn_mask, sinks, sliding_window, softcap, "exact")
    mass = key.new_empty(key.shape[:3], dtype=torch.float32)
    return mass, torch.empty_like(mass)


define(
    "attention_mass(Tensor query, Tensor key, Tensor? attn_mask=None, *, float? scale=None, "
    "bool is_causal=False, SymInt? sliding_window=None, float? softcap=None, Tensor? sinks=None) "
    "-> (Tensor, Tensor)",
    reference.attention_mass,
    _attention_mass_fake,
)


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
    """Mean attention weight of every key over some queries, for each KV head.

    Query i of T stands at position ``tokens - T + i``. There is no kernel of its own: it runs once
    for a prompt, on its last queries.

    Args:
        query: ``[batch, heads, queries, key_dim]``, float32, float16 or bfloat16; heads a multiple
            of the KV heads.
        key: ``[batch, kv_heads, tokens, key_dim]``, float32, float16 or bfloat16.
        attn_mask: bool (True = attend) or additive float, broadcastable to
            ``[batch, heads, queries, tokens]``.
        scale: factor of the scores, ``key_dim ** -0.5`` when not given.
        is_causal: mask keys behind the query's position.
        sliding_window: attend only to the last so many positions, the query's own included.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the mask.
        sinks: ``[heads]``, a logit per head that joins the softmax without a value.

    Returns:
        ``(mass, greatest)``, float32 ``[batch, kv_heads, tokens]`` each: the mean weight over the
        queries and the heads of the KV head, from 0 to 1, and the logarithm of the greatest, as
        `tiered_attention` gives it; 0 and -inf for masked keys.

    Raises:
        ValueError: shapes, dtypes or options outside the above.

    Example:
        >>> query, key = torch.randn(1, 8, 32, 64), torch.randn(1, 2, 500, 64)
        >>> mass, greatest = attention_mass(query, key, is_causal=True)
        >>> mass.shape, torch.allclose(mass.sum(-1), torch.ones(1, 2))
        (torch.Size([1, 2, 500]), True)
    """
    return torch.ops.kvq.attention_mass(
        query,
        key,
        attn_mask,
        scale=scale,
        is_causal=is_causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
    )
