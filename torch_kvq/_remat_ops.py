"""The operators that rematerialise keys and values: schema, fake kernel, wrapper of each."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_kvq import _x_checks, reference
from torch_kvq._ops import define
from torch_kvq.formats import TILE_TOKENS


def _remat_kv_fake(
    records: Sequence[Tensor],
    value_records: Sequence[Tensor],
    key_weight: Tensor,
    value_weight: Tensor,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    key_norm: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    bits: Sequence[int],
    value_bits: Sequence[int] = (),
    kv_heads: int,
    axis: str = "token",
    value_axis: str = "token",
    rotate: bool = True,
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    sizes = _x_checks.check_remat(
        records,
        value_records,
        key_weight,
        value_weight,
        key_bias,
        value_bias,
        key_norm,
        cos,
        sin,
        bits,
        value_bits,
        kv_heads,
        axis,
        value_axis,
        norm_eps,
    )
    shape = (records[0].shape[0], kv_heads, records[0].shape[1] * TILE_TOKENS)
    return (
        key_weight.new_empty((*shape, sizes.key_dim)),
        key_weight.new_empty((*shape, sizes.value_dim)),
    )


_PROJECTION = (
    "Tensor key_weight, Tensor value_weight, Tensor? key_bias=None, Tensor? value_bias=None, "
    "Tensor? key_norm=None, Tensor? cos=None, Tensor? sin=None"
)
_RECORDS = (
    'int[] bits, int[] value_bits=[], int kv_heads, str axis="token", str value_axis="token", '
    "bool rotate=True, float norm_eps=1e-6"
)
define(
    f"remat_kv(Tensor[] records, Tensor[] value_records, {_PROJECTION}, *, {_RECORDS}) "
    "-> (Tensor, Tensor)",
    reference.remat_kv,
    _remat_kv_fake,
)


def remat_kv(
    records: Sequence[Tensor],
    key_weight: Tensor,
    value_weight: Tensor,
    key_bias: Tensor | None = None,
    value_bias: Tensor | None = None,
    key_norm: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    bits: Sequence[int],
    kv_heads: int,
    axis: str = "token",
    rotate: bool = True,
    value_records: Sequence[Tensor] = (),
    value_bits: Sequence[int] = (),
    value_axis: str = "token",
    norm_eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Rematerialise keys and values from the cached inputs of a layer.

    An input is the sum of its decoded records: one, or an accumulator and a difference. Weights
    act on the input itself, whose rotation is undone while it is decoded: that costs one to four
    hundredths of a matrix product and spares a rotated copy of the weights. On the CPU, float16
    weights are multiplied in float32, and so are bfloat16 ones without AVX-512 BF16. There are no
    gradients.

    Args:
        records: one or more of uint8 ``[batch, pages, record_bytes]``, see `quantize_x`; those of
            16 bits hold the weights' dtype.
        key_weight: ``[kv_heads * key_dim, channels]``, float32, float16 or bfloat16.
        value_weight: ``[kv_heads * value_dim, channels]`` in the same dtype.
        key_bias: ``[kv_heads * key_dim]``.
        value_bias: ``[kv_heads * value_dim]``.
        key_norm: ``[key_dim]``, factors of a root-mean-square norm of each key.
        cos: ``[batch or 1, tokens, rotary_dim]``, the rotary embedding of token t of a row in its
            row t; its halves repeat each other. Channels of a key beyond ``rotary_dim`` stay.
        sin: the same.
        bits: bits of each of ``records``.
        kv_heads: key and value heads.
        axis: axis of ``records``.
        rotate: whether the records hold rotated channels.
        value_records: records that values are made of, where not of the same input as keys.
        value_bits: bits of each of them.
        value_axis: their axis.
        norm_eps: added to the variance of the norm.

    Returns:
        ``(key, value)``: ``[batch, kv_heads, 64 * pages, key_dim]`` and
        ``[batch, kv_heads, 64 * pages, value_dim]`` in the weights' dtype.

    Raises:
        ValueError: shapes, dtypes or options outside the above.

    Example:
        >>> from torch_kvq import quantize_x
        >>> x, weight = torch.randn(1, 128, 64), torch.randn(2, 64, 64)
        >>> key, value = remat_kv([quantize_x(x)], *weight, bits=[4], kv_heads=2)
        >>> key.shape
        torch.Size([1, 2, 128, 32])
    """
    return torch.ops.kvq.remat_kv(
        list(records),
        list(value_records),
        key_weight,
        value_weight,
        key_bias,
        value_bias,
        key_norm,
        cos,
        sin,
        bits=list(bits),
        value_bits=list(value_bits),
        kv_heads=kv_heads,
        axis=axis,
        value_axis=value_axis,
        rotate=rotate,
        norm_eps=norm_eps,
    )


def _remat_attention_fake(
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
    sizes = _x_checks.check_remat_attention(
        query, records, value_records, exact, value_exact, lengths, key_weight, value_weight,
        key_bias, value_bias, key_norm, cos, sin, attn_mask, bits, value_bits, kv_heads, axis,
        value_axis, norm_eps, sliding_window, softcap, sinks, absorb_key,
    )  # fmt: skip
    out = query.new_empty((*query.shape[:3], sizes.value_dim))
    return out, query.new_empty(query.shape[:3], dtype=torch.float32)


define(
    "remat_attention(Tensor query, Tensor[] records, Tensor[] value_records, Tensor exact, "
    f"Tensor? value_exact, Tensor lengths, {_PROJECTION}, Tensor? attn_mask=None, *, {_RECORDS}, "
    "float? scale=None, bool is_causal=False, SymInt? sliding_window=None, float? softcap=None, "
    "Tensor? sinks=None, bool? absorb_key=None, bool? absorb_value=None) -> (Tensor, Tensor)",
    reference.remat_attention,
    _remat_attention_fake,
)


def remat_attention(
    query: Tensor,
    records: Sequence[Tensor],
    exact: Tensor,
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
    kv_heads: int,
    axis: str = "token",
    rotate: bool = True,
    value_records: Sequence[Tensor] = (),
    value_exact: Tensor | None = None,
    value_bits: Sequence[int] = (),
    value_axis: str = "token",
    norm_eps: float = 1e-6,
    scale: float | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    absorb_key: bool | None = None,
    absorb_value: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the cached inputs of a layer, whose keys and values are rematerialised in blocks.

    Token t of a row, the one at position ``start + t``, is in the records while
    ``t < quantized``, page ``t // 64``, and in ``exact[t - quantized]`` otherwise. Keys and values
    never exist for more than 512 tokens at a time. Where `choose_absorption` finds it cheaper, the
    weight of the values is applied to the weighted sum of the inputs, and that of keys without a
    norm or a rotary embedding to the queries.

    Args:
        query: ``[batch, heads, tokens, key_dim]``, float32, float16 or bfloat16; its last token is
            at position ``length - 1`` of its row.
        records: see `remat_kv`.
        exact: ``[batch, capacity, channels]``, inputs that are not in records, any float dtype.
        lengths: int32 ``[batch, 3]``: start, length, quantized.
        key_weight: see `remat_kv`.
        value_weight: see `remat_kv`.
        key_bias: see `remat_kv`.
        value_bias: see `remat_kv`.
        key_norm: see `remat_kv`.
        cos: at least as many tokens as the longest row.
        sin: the same.
        attn_mask: bool (True = attend) or additive float, broadcastable to
            ``[batch, heads, tokens, positions]``, at least as many columns as positions.
        bits: see `remat_kv`.
        kv_heads: see `remat_kv`.
        axis: see `remat_kv`.
        rotate: see `remat_kv`.
        value_records: see `remat_kv`.
        value_exact: ``[batch, capacity, value_channels]``, with ``value_records``.
        value_bits: see `remat_kv`.
        value_axis: see `remat_kv`.
        norm_eps: see `remat_kv`.
        scale: factor of the scores, ``key_dim ** -0.5`` when not given.
        is_causal: mask keys behind the query's position.
        sliding_window: attend only to the last so many positions, the query's own included.
        softcap: scores become ``softcap * tanh(score / softcap)`` before the mask.
        sinks: ``[heads]``, a logit per head that joins the softmax without a value.
        absorb_key: absorb the weight of the keys or not; by cost when not given.
        absorb_value: the same for values.

    Returns:
        ``(out, lse)``: ``[batch, heads, tokens, value_dim]`` in the query's dtype, and the natural
        logarithm of the denominator, float32 ``[batch, heads, tokens]``, ``sinks`` included.

    Raises:
        IndexError: lengths outside their buffers.
        ValueError: shapes, dtypes or options outside the above, a mask or an embedding that is too
            short, keys that cannot be absorbed.

    Example:
        >>> from torch_kvq import quantize_x
        >>> x, weight = torch.randn(1, 100, 64), torch.randn(2, 64, 64)
        >>> lengths = torch.tensor([[0, 100, 64]], dtype=torch.int32)
        >>> records = [quantize_x(x[:, :64])]
        >>> query = torch.randn(1, 4, 1, 32)
        >>> out, lse = remat_attention(
        ...     query, records, x[:, 64:], lengths, *weight, bits=[4], kv_heads=2
        ... )
        >>> out.shape
        torch.Size([1, 4, 1, 32])
    """
    return torch.ops.kvq.remat_attention(
        query,
        list(records),
        list(value_records),
        exact,
        value_exact,
        lengths,
        key_weight,
        value_weight,
        key_bias,
        value_bias,
        key_norm,
        cos,
        sin,
        attn_mask,
        bits=list(bits),
        value_bits=list(value_bits),
        kv_heads=kv_heads,
        axis=axis,
        value_axis=value_axis,
        rotate=rotate,
        norm_eps=norm_eps,
        scale=scale,
        is_causal=is_causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        absorb_key=absorb_key,
        absorb_value=absorb_value,
    )
