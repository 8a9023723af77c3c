"""The operators of ``torch.ops.kvq``: schema, fake kernel, reference and typed wrapper of each.

A schema lives here and nowhere else. The reference (`torch_kvq.reference`) is registered for every
backend; the compiled kernels of `csrc/` replace it on the CPU. Those of two-tier layers are in
`torch_kvq._tiered_ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_kvq import _checks, reference
from torch_kvq.formats import TILE_TOKENS, check_bits

_library = torch.library.Library("kvq", "FRAGMENT")


def define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Define an operator by its schema, with its reference and its fake kernel."""
    _library.define(schema)
    name = schema[: schema.index("(")]
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvq::{name}", fake, lib=_library)


def _fwht_fake(x: Tensor, signs: Tensor | None = None, inverse: bool = False) -> Tensor:
    _checks.check_transform(x, signs)
    return x.new_empty(x.shape)


define(
    "fwht(Tensor x, Tensor? signs=None, bool inverse=False) -> Tensor", reference.fwht, _fwht_fake
)


def fwht(x: Tensor, signs: Tensor | None = None, inverse: bool = False) -> Tensor:
    """Orthonormal Hadamard transform over the last dimension: ``H(signs * x)``.

    Dimensions that are not powers of two use a Kronecker product with a Hadamard matrix of order
    12, 20 or 28, or else transform blocks (docs/formats.md, "Rotation").

    Args:
        x: ``[..., dim]``, float32, float16 or bfloat16; dim a multiple of 16 from 32 to 512.
        signs: ``[dim]``, float32, multiplied before the transform (after it when ``inverse``).
        inverse: undo the transform: ``signs * H'(x)``.

    Returns:
        ``[..., dim]`` in the dtype of ``x``.

    Raises:
        ValueError: a dim, a dtype or a shape of ``signs`` outside the above.

    Example:
        >>> x = torch.randn(3, 96)
        >>> torch.allclose(fwht(fwht(x), inverse=True), x, atol=1e-5)
        True
    """
    return torch.ops.kvq.fwht(x, signs, inverse)


def _key_balance_fake(key: Tensor) -> Tensor:
    _checks.check_key(key)
    return key.new_empty((key.shape[0], key.shape[1], key.shape[3]), dtype=torch.float32)


define("key_balance(Tensor key) -> Tensor", reference.key_balance, _key_balance_fake)


def key_balance(key: Tensor) -> Tensor:
    """Balance of the key channels: the variance to the power -1/4, clamped from below.

    Args:
        key: ``[batch, kv_heads, tokens, dim]``; the first 192 tokens are used.

    Returns:
        float32 ``[batch, kv_heads, dim]``.

    Raises:
        ValueError: no tokens, or a dim that is not a multiple of 16 from 32 to 512.

    Example:
        >>> key_balance(torch.randn(1, 2, 256, 64)).shape
        torch.Size([1, 2, 64])
    """
    return torch.ops.kvq.key_balance(key)


def _quantize_tile_fake(
    key: Tensor, value: Tensor, balance: Tensor, key_bits: int, value_bits: int
) -> Tensor:
    layout = _checks.check_tile_input(key, value, balance, key_bits, value_bits)
    return key.new_empty((key.shape[0], key.shape[1], layout.record_bytes), dtype=torch.uint8)


define(
    "quantize_tile(Tensor key, Tensor value, Tensor balance, int key_bits, int value_bits) "
    "-> Tensor",
    reference.quantize_tile,
    _quantize_tile_fake,
)


def quantize_tile(
    key: Tensor, value: Tensor, balance: Tensor, key_bits: int = 4, value_bits: int = 4
) -> Tensor:
    """Encode tiles of 64 tokens into records (docs/formats.md, "Encoding").

    Args:
        key: ``[tiles, kv_heads, 64, key_dim]``, float32, float16 or bfloat16.
        value: ``[tiles, kv_heads, 64, value_dim]`` in the same dtype.
        balance: float32 ``[tiles or 1, kv_heads, key_dim]``, see `key_balance`.
        key_bits: 2, 3 or 4, or 16 for raw keys.
        value_bits: 2, 3 or 4, or 16 for raw values.

    Returns:
        Records, uint8 ``[tiles, kv_heads, record_bytes]``.

    Raises:
        ValueError: bits, dims, dtypes or shapes outside the above.

    Example:
        >>> key, value = torch.randn(2, 5, 3, 64, 128)
        >>> quantize_tile(key, value, key_balance(key)).shape
        torch.Size([5, 3, 8640])
    """
    return torch.ops.kvq.quantize_tile(key, value, balance, key_bits, value_bits)


def _quantize_tile_mut_fake(
    tiles: Tensor,
    block_table: Tensor,
    balance: Tensor,
    exact_key: Tensor,
    exact_value: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    key_bits: int,
    value_bits: int,
    sink_tokens: int = 4,
    residual_length: int = 64,
    quantized_start: int = 256,
) -> None:
    reference.check_append(
        tiles,
        block_table,
        balance,
        exact_key,
        exact_value,
        lengths,
        key,
        value,
        key_bits,
        value_bits,
        sink_tokens,
        residual_length,
        quantized_start,
    )


define(
    "quantize_tile_(Tensor(a!) tiles, Tensor block_table, Tensor(b!) balance, "
    "Tensor(c!) exact_key, Tensor(d!) exact_value, Tensor(e!) lengths, Tensor key, Tensor value, "
    "int key_bits, int value_bits, int sink_tokens=4, SymInt residual_length=64, "
    "int quantized_start=256) -> ()",
    reference.quantize_tile_,
    _quantize_tile_mut_fake,
)


def quantize_tile_(
    tiles: Tensor,
    block_table: Tensor,
    balance: Tensor,
    exact_key: Tensor,
    exact_value: Tensor,
    lengths: Tensor,
    key: Tensor,
    value: Tensor,
    key_bits: int = 4,
    value_bits: int = 4,
    sink_tokens: int = 4,
    residual_length: int = 64,
    quantized_start: int = 256,
) -> None:
    """Append tokens to a layer, in place, and turn the tokens that are due into tiles.

    The state (first six arguments) is described in docs/formats.md, "State of a layer". Whether a
    tile is due is decided here from ``lengths``, and the balance is fixed here when a row writes
    its first tile, so one traced graph serves every step. A row skips the new positions that lie
    in its left padding (``lengths[:, 0]``). What is written must be contiguous, and everything is
    checked before anything is written.

    Args:
        tiles: uint8 ``[pages, kv_heads, record_bytes]``, written through ``block_table``.
        block_table: int32 ``[batch, max_pages]``.
        balance: float32 ``[batch, kv_heads, key_dim]``, written once per row.
        exact_key: ``[batch, kv_heads, capacity, key_dim]`` in the model's dtype.
        exact_value: ``[batch, kv_heads, capacity, value_dim]``.
        lengths: int32 ``[batch, 3]``: start, length, quantized; advanced by the call.
        key: new keys ``[batch, kv_heads, tokens, key_dim]``, dtype of ``exact_key``.
        value: new values ``[batch, kv_heads, tokens, value_dim]``.
        key_bits: 2, 3 or 4, or 16 (pass-through).
        value_bits: 2, 3 or 4, or 16 (pass-through).
        sink_tokens: first tokens of a row that stay exact.
        residual_length: recent tokens that stay exact.
        quantized_start: tokens up to which nothing is quantised.

    Raises:
        IndexError: the new tokens do not fit the pages or the exact buffers.
        ValueError: bits, dims, dtypes or shapes that do not match the state.
    """
    torch.ops.kvq.quantize_tile_(
        tiles,
        block_table,
        balance,
        exact_key,
        exact_value,
        lengths,
        key,
        value,
        key_bits,
        value_bits,
        sink_tokens,
        residual_length,
        quantized_start,
    )


def _dequantize_tile_fake(
    tiles: Tensor,
    balance: Tensor,
    key_bits: int,
    value_bits: int,
    value_dim: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    reference.check_records(tiles, balance, key_bits, value_bits, value_dim, dtype)
    shape = (tiles.shape[0], tiles.shape[1], TILE_TOKENS)
    key = tiles.new_empty((*shape, balance.shape[-1]), dtype=dtype)
    return key, tiles.new_empty((*shape, value_dim), dtype=dtype)


define(
    "dequantize_tile(Tensor tiles, Tensor balance, int key_bits, int value_bits, int value_dim, "
    "ScalarType dtype=float32) -> (Tensor, Tensor)",
    reference.dequantize_tile,
    _dequantize_tile_fake,
)


def dequantize_tile(
    tiles: Tensor,
    balance: Tensor,
    key_bits: int = 4,
    value_bits: int = 4,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Decode records into keys and values, the inverse of `quantize_tile`.

    Args:
        tiles: records, uint8 ``[tiles, kv_heads, record_bytes]``.
        balance: float32 ``[tiles or 1, kv_heads, key_dim]``, the one they were encoded with.
        key_bits: bits of the keys in the records.
        value_bits: bits of the values in the records.
        value_dim: channels of the values; those of the keys when not given.
        dtype: dtype of the result; at 16 bits the dtype of the records.

    Returns:
        ``(key, value)``: ``[tiles, kv_heads, 64, key_dim]`` and
        ``[tiles, kv_heads, 64, value_dim]``.

    Raises:
        ValueError: bits, dims or shapes that do not match the records.

    Example:
        >>> key, value = torch.randn(2, 5, 3, 64, 128)
        >>> balance = key_balance(key)
        >>> decoded, _ = dequantize_tile(quantize_tile(key, value, balance), balance)
        >>> bool((decoded - key).norm() / key.norm() < 0.12)
        True
    """
    dim = balance.shape[-1] if value_dim is None else value_dim
    check_bits(key_bits, value_bits)
    return torch.ops.kvq.dequantize_tile(tiles, balance, key_bits, value_bits, dim, dtype)


def _lut_attention_fake(
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
    _checks.check_state(
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
    shape = query.shape[:3]
    return (
        query.new_empty((*shape, exact_value.shape[-1])),
        query.new_empty(shape, dtype=torch.float32),
    )


define(
    "lut_attention(Tensor query, Tensor tiles, Tensor block_table, Tensor balance, "
    "Tensor exact_key, Tensor exact_value, Tensor lengths, Tensor? attn_mask=None, *, "
    "int key_bits=4, int value_bits=4, int sink_tokens=4, float? scale=None, "
    "bool is_causal=False, SymInt? sliding_window=None, float? softcap=None, Tensor? sinks=None, "
    'str precision="exact") -> (Tensor, Tensor)',
    reference.lut_attention,
    _lut_attention_fake,
)


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
    """Attention over a packed layer: tiles, sink tokens and window in one call.

    The state (tiles to lengths) is described in docs/formats.md, "State of a layer". Query i of T
    stands at position ``length - T + i``; columns of ``attn_mask`` are positions, left padding
    included. The kernels keep the inner loop in integers: with ``precision="exact"`` within 1e-3
    (relative, per head) of float arithmetic on the same codes, with ``"fast"`` within 6e-2 as long
    as the scores of a query have a standard deviation of at most 3; the reference computes in
    float32 and ignores the setting.

    Args:
        query: ``[batch, heads, tokens, key_dim]``, float32, float16 or bfloat16; heads a multiple
            of the KV heads.
        tiles: records, uint8 ``[pages, kv_heads, record_bytes]``.
        block_table: int32 ``[batch, max_pages]``.
        balance: float32 ``[batch, kv_heads, key_dim]``.
        exact_key: ``[batch, kv_heads, capacity, key_dim]``.
        exact_value: ``[batch, kv_heads, capacity, value_dim]``.
        lengths: int32 ``[batch, 3]``: start, length, quantized.
        attn_mask: bool (True = attend) or additive float, broadcastable to
            ``[batch, heads, tokens, positions]``; at least as many columns as positions. An
            additive value of -8192 or less masks the key.
        key_bits: bits of the keys in the records.
        value_bits: bits of the values in the records.
        sink_tokens: first tokens of a row in the exact buffer.
        scale: factor of the scores, ``key_dim ** -0.5`` when not given.
        is_causal: mask keys behind the query's position.
        sliding_window: attend only to the last so many positions, the query's own included.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the mask.
        sinks: ``[heads]``, a logit per head that joins the softmax without a value.
        precision: ``"exact"`` or ``"fast"``.

    Returns:
        ``(out, lse)``: ``[batch, heads, tokens, value_dim]`` in the query's dtype, and the float32
        log-sum-exp ``[batch, heads, tokens]`` (natural logarithm, ``sinks`` included) with which
        parts can be merged. A query whose keys are all masked gives zeros and ``-inf``, or the
        logit of ``sinks``.

    Raises:
        IndexError: lengths or pages outside the buffers.
        ValueError: shapes, dtypes, bits or options outside the above, a mask with too few columns.
    """
    return torch.ops.kvq.lut_attention(
        query,
        tiles,
        block_table,
        balance,
        exact_key,
        exact_value,
        lengths,
        attn_mask,
        key_bits=key_bits,
        value_bits=value_bits,
        sink_tokens=sink_tokens,
        scale=scale,
        is_causal=is_causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        precision=precision,
    )
