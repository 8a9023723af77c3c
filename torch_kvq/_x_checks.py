"""Argument checks of the operators on layer inputs; ``csrc/quantize_x.cpp`` is the C++ twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_kvq import _checks
from torch_kvq._x_formats import XFormat
from torch_kvq.formats import PASS_THROUGH_BITS, TILE_TOKENS


def check_x(x: Tensor, bits: int, axis: str) -> XFormat:
    """Check layer inputs ``[batch, tokens, channels]`` and return their record format."""
    _checks.check_rank(3, x=x)
    _checks.check_float(x=x)
    layout = XFormat(x.shape[2], bits, axis, x.element_size())
    if axis == "channel" and x.shape[1] % TILE_TOKENS:
        raise ValueError(
            "x.shape[1] must be a multiple of 64 (tokens of a group) with axis='channel', "
            f"got shape {tuple(x.shape)}"
        )
    return layout


def check_x_records(
    records: Tensor,
    channels: int,
    bits: int,
    axis: str,
    dtype: torch.dtype,
    name: str = "records",
) -> XFormat:
    """Check records ``[batch, pages, record_bytes]`` and return their format."""
    if dtype not in _checks.FLOATS:
        raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
    layout = XFormat(channels, bits, axis, dtype.itemsize)
    _checks.check_rank(3, **{name: records})
    _checks.check_dtype(torch.uint8, **{name: records})
    _checks.check_shape(name, records, (2, layout.record_bytes, "record_bytes"))
    return layout


class Projections(NamedTuple):
    """Sizes of the heads that cached inputs are projected to."""

    kv_heads: int
    key_dim: int
    value_dim: int
    key_channels: int
    value_channels: int


def check_sources(
    records: Sequence[Tensor],
    bits: Sequence[int],
    axis: str,
    channels: int,
    dtype: torch.dtype,
    prefix: str = "",
) -> None:
    """Check records whose decoded sum is a cached input."""
    name = f"{prefix}records"
    if not records or len(records) != len(bits):
        raise ValueError(
            f"{name} must hold a tensor for each of {prefix}bits, got {len(records)} tensors and "
            f"{prefix}bits={list(bits)}"
        )
    for n, (part, width) in enumerate(zip(records, bits, strict=True)):
        check_x_records(part, channels, width, axis, dtype, f"{name}[{n}]")
        for dim in (0, 1):
            size = records[0].shape[dim]
            _checks.check_shape(f"{name}[{n}]", part, (dim, size, f"{name}[0].shape[{dim}]"))


def check_x_sum(
    records: Sequence[Tensor], channels: int, bits: Sequence[int], out_bits: int, axis: str
) -> XFormat:
    """Check records that are added up and return the format of their sum."""
    check_sources(records, bits, axis, channels, torch.float32)
    for name, width in (*(("bits", width) for width in bits), ("out_bits", out_bits)):
        if width == PASS_THROUGH_BITS:
            raise ValueError(f"{name} must be 2, 3, 4 or 8 in a sum of records, got 16")
    return XFormat(channels, out_bits, axis)


def check_remat(
    records: Sequence[Tensor],
    value_records: Sequence[Tensor],
    key_weight: Tensor,
    value_weight: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    key_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    bits: Sequence[int],
    value_bits: Sequence[int],
    kv_heads: int,
    axis: str,
    value_axis: str,
    norm_eps: float,
) -> Projections:
    """Check cached inputs and the weights they are projected by."""
    _checks.check_rank(2, key_weight=key_weight, value_weight=value_weight)
    _checks.check_float(key_weight=key_weight)
    _checks.check_dtype(key_weight.dtype, value_weight=value_weight)
    if kv_heads < 1:
        raise ValueError(f"kv_heads must be at least 1, got {kv_heads}")
    for name, weight, bias in (
        ("key", key_weight, key_bias),
        ("value", value_weight, value_bias),
    ):
        if weight.shape[0] % kv_heads or weight.shape[0] == 0:
            raise ValueError(
                f"{name}_weight.shape[0] must be a multiple of {kv_heads} kv heads, "
                f"got shape {tuple(weight.shape)}"
            )
        if bias is not None:
            bias_name = f"{name}_bias"
            _checks.check_rank(1, **{bias_name: bias})
            _checks.check_float(**{bias_name: bias})
            owner = f"{name}_weight.shape[0]"
            _checks.check_shape(bias_name, bias, (0, weight.shape[0], owner))
    check_sources(records, bits, axis, key_weight.shape[1], key_weight.dtype)
    if value_records or value_bits:
        check_sources(
            value_records, value_bits, value_axis, value_weight.shape[1], key_weight.dtype, "value_"
        )
        _checks.check_shape(
            "value_records[0]",
            value_records[0],
            *((i, records[0].shape[i], f"records[0].shape[{i}]") for i in (0, 1)),
        )
    else:
        owner = "key_weight.shape[1]"
        _checks.check_shape("value_weight", value_weight, (1, key_weight.shape[1], owner))
    sizes = Projections(
        kv_heads,
        key_weight.shape[0] // kv_heads,
        value_weight.shape[0] // kv_heads,
        key_weight.shape[1],
        value_weight.shape[1],
    )
    _check_positions(key_norm, cos, sin, sizes.key_dim, records[0].shape[0])
    if not norm_eps >= 0:
        raise ValueError(f"norm_eps must not be negative, got {norm_eps}")
    _checks.check_same_device(
        records=records[0],
        key_weight=key_weight,
        value_weight=value_weight,
        key_bias=key_bias,
        value_bias=value_bias,
        key_norm=key_norm,
        cos=cos,
        sin=sin,
    )
    return sizes


def _check_positions(
    key_norm: Tensor | None, cos: Tensor | None, sin: Tensor | None, key_dim: int, batch: int
) -> None:
    if key_norm is not None:
        _checks.check_rank(1, key_norm=key_norm)
        _checks.check_float(key_norm=key_norm)
        _checks.check_shape("key_norm", key_norm, (0, key_dim, "key dim"))
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin must both be given or both be None")
    if cos is None or sin is None:
        return
    _checks.check_rank(3, cos=cos, sin=sin)
    _checks.check_float(cos=cos, sin=sin)
    _checks.check_shape("sin", sin, *((i, cos.shape[i], f"cos.shape[{i}]") for i in range(3)))
    if cos.shape[0] not in (1, batch):
        raise ValueError(f"cos.shape[0] must be 1 or {batch}, got shape {tuple(cos.shape)}")
    if cos.shape[2] % 2 or not 0 < cos.shape[2] <= key_dim:
        raise ValueError(
            f"cos.shape[2] must be even and at most {key_dim} (key dim), "
            f"got shape {tuple(cos.shape)}"
        )


def check_tokens(cos: Tensor | None, tokens: int) -> None:
    """Raise ValueError where the positional embedding ends before the tokens do."""
    if cos is not None and cos.shape[1] < tokens:
        raise ValueError(
            f"cos.shape[1] must be at least {tokens} (tokens), got shape {tuple(cos.shape)}"
        )


def check_exact_x(
    exact: Tensor, value_exact: Tensor | None, sizes: Projections, batch: int, separate: bool
) -> None:
    """Check the inputs that are not in records yet."""
    _checks.check_rank(3, exact=exact)
    _checks.check_float(exact=exact)
    owner = "key_weight.shape[1]"
    _checks.check_shape("exact", exact, (0, batch, "batch"), (2, sizes.key_channels, owner))
    if (value_exact is not None) != separate:
        raise ValueError(
            "value_exact belongs to value_records, got "
            f"{'none' if value_exact is None else f'shape {tuple(value_exact.shape)}'}"
        )
    if value_exact is None:
        return
    _checks.check_rank(3, value_exact=value_exact)
    _checks.check_float(value_exact=value_exact)
    _checks.check_shape(
        "value_exact",
        value_exact,
        (0, batch, "batch"),
        (1, exact.shape[1], "exact.shape[1]"),
        (2, sizes.value_channels, "value_weight.shape[1]"),
    )


def check_absorbable(absorb_key: bool | None, key_norm: Tensor | None, cos: Tensor | None) -> None:
    """Raise ValueError where keys cannot be absorbed but should be."""
    if absorb_key and (key_norm is not None or cos is not None):
        raise ValueError(
            "absorb_key must be False or None for keys with key_norm or cos and sin, got True"
        )


def check_remat_attention(
    query: Tensor,
    records: Sequence[Tensor],
    value_records: Sequence[Tensor],
    exact: Tensor,
    value_exact: Tensor | None,
    lengths: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    key_norm: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    attn_mask: Tensor | None,
    bits: Sequence[int],
    value_bits: Sequence[int],
    kv_heads: int,
    axis: str,
    value_axis: str,
    norm_eps: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    absorb_key: bool | None,
) -> Projections:
    """Check an attention call over cached inputs without reading data."""
    sizes = check_remat(
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
    batch = records[0].shape[0]
    check_exact_x(exact, value_exact, sizes, batch, bool(value_records))
    _checks.check_rank(2, lengths=lengths)
    _checks.check_dtype(torch.int32, lengths=lengths)
    _checks.check_shape("lengths", lengths, (0, batch, "batch"), (1, 3, "start, length, quantized"))
    head_shape = exact.new_empty((batch, kv_heads, 0, sizes.key_dim))
    _checks.check_query(query, head_shape, attn_mask, sinks, sliding_window, softcap, "exact")
    _checks.check_same_device(records=records[0], query=query, exact=exact, lengths=lengths)
    check_absorbable(absorb_key, key_norm, cos)
    return sizes
