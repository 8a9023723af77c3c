"""Meaning of ``kvq::quantize_tile_``: append tokens and encode those that are due."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_kvq import _checks, formats
from torch_kvq.reference import encode, packing
from torch_kvq.reference.decode import read_record

_TILE = formats.TILE_TOKENS


class _RowPlan(NamedTuple):
    """What an append does to one row."""

    tokens: int
    skipped: int
    new_tokens: int
    quantized: int
    new_quantized: int
    pages: list[int]
    balance_tokens: int


def check_append(
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
    sink_tokens: int,
    residual_length: int,
    quantized_start: int,
) -> formats.TileFormat:
    """Check shapes, dtypes and options of an append without reading data.

    The arguments are those of ``torch_kvq.quantize_tile_``.

    Returns:
        The record format.
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
    _checks.check_not_negative(residual_length=residual_length, quantized_start=quantized_start)
    _checks.check_new_tokens(key, value)
    _checks.check_dtype(exact_key.dtype, key=key)
    batch, kv_heads = exact_key.shape[:2]
    _checks.check_shape(
        "key",
        key,
        (0, batch, "batch"),
        (1, kv_heads, "kv heads"),
        (3, exact_key.shape[3], "key dim"),
    )
    _checks.check_shape("value", value, (3, exact_value.shape[3], "value dim"))
    _checks.check_same_device(tiles=tiles, key=key, value=value)
    _checks.check_contiguous(
        tiles=tiles,
        balance=balance,
        exact_key=exact_key,
        exact_value=exact_value,
        lengths=lengths,
    )
    return layout


def quantize_tile_(
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
    """Append tokens to a layer in place, one row after the other.

    Args:
        tiles: uint8 ``[pages, kv_heads, record_bytes]``.
        block_table: int32 ``[batch, max_pages]``.
        balance: float32 ``[batch, kv_heads, key_dim]``.
        exact_key: ``[batch, kv_heads, capacity, key_dim]``.
        exact_value: ``[batch, kv_heads, capacity, value_dim]``.
        lengths: int32 ``[batch, 3]``.
        key: ``[batch, kv_heads, tokens, key_dim]``.
        value: ``[batch, kv_heads, tokens, value_dim]``.
        key_bits: bits of the keys.
        value_bits: bits of the values.
        sink_tokens: first tokens of a row that stay exact.
        residual_length: recent tokens that stay exact.
        quantized_start: tokens up to which nothing is quantised.
    """
    layout = check_append(
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
    _checks.check_lengths(lengths, exact_key.shape[2], block_table.shape[1], sink_tokens)
    rule = {
        "sink_tokens": sink_tokens,
        "residual_length": residual_length,
        "quantized_start": quantized_start,
    }
    plans = [
        _plan_row(block_table, row, state, key.shape[2], exact_key.shape[2], tiles.shape[0], rule)
        for row, state in enumerate(lengths.tolist())
    ]
    for row, plan in enumerate(plans):
        _append_row(
            tiles,
            balance[row],
            exact_key[row],
            exact_value[row],
            key[row, :, plan.skipped :],
            value[row, :, plan.skipped :],
            plan,
            layout,
            sink_tokens,
        )
    lengths[:, formats.LENGTH] += key.shape[2]
    for row, plan in enumerate(plans):
        lengths[row, formats.QUANTIZED] = plan.new_quantized


def _plan_row(
    block_table: Tensor,
    row: int,
    state: list[int],
    added: int,
    capacity: int,
    total_pages: int,
    rule: dict[str, int],
) -> _RowPlan:
    """Plan one row, whose ``state`` is its row of ``lengths``, and check that it fits."""
    start, length, quantized = state
    tokens, new_tokens = max(length - start, 0), max(length + added - start, 0)
    due = formats.quantized_tokens(new_tokens, quantized, **rule)
    _check_fits(row, new_tokens, due, capacity, block_table.shape[1])
    first, end = quantized // _TILE, -(-due // _TILE)
    pages = _checks.check_pages(block_table, row, first, end, total_pages)
    skipped = added - (new_tokens - tokens)
    balance_tokens = formats.balance_tokens(rule["sink_tokens"], rule["quantized_start"])
    return _RowPlan(tokens, skipped, new_tokens, quantized, due, pages, balance_tokens)


def _check_fits(row: int, tokens: int, quantized: int, capacity: int, max_pages: int) -> None:
    if -(-quantized // _TILE) > max_pages:
        raise IndexError(
            f"block_table holds {max_pages} pages, row {row} needs {-(-quantized // _TILE)} "
            f"for {quantized} quantised tokens"
        )
    if tokens - quantized > capacity:
        raise IndexError(
            f"exact_key and exact_value hold {capacity} tokens, row {row} needs "
            f"{tokens - quantized} for {tokens} tokens of which {quantized} are quantised"
        )


def _append_row(
    tiles: Tensor,
    balance: Tensor,
    exact_key: Tensor,
    exact_value: Tensor,
    key: Tensor,
    value: Tensor,
    plan: _RowPlan,
    layout: formats.TileFormat,
    sink_tokens: int,
) -> None:
    """Append to one row; the tensors lack the batch dimension, but ``tiles`` has its pages."""
    held = plan.tokens - plan.quantized
    all_key = torch.cat((exact_key[:, :held], key), 1)
    all_value = torch.cat((exact_value[:, :held], value), 1)
    sinks = min(sink_tokens, plan.new_tokens)
    recent_key, recent_value = all_key[:, sinks:], all_value[:, sinks:]
    moved = plan.new_quantized - plan.quantized
    if moved:
        if plan.quantized == 0 and not layout.is_pass_through:
            first_keys = recent_key[None, :, : plan.balance_tokens]
            balance.copy_(encode.key_balance(first_keys)[0])
        _encode_tokens(tiles, balance, recent_key[:, :moved], recent_value[:, :moved], plan, layout)
    exact = plan.new_tokens - plan.new_quantized
    exact_key[:, :exact] = torch.cat((all_key[:, :sinks], recent_key[:, moved:]), 1)
    exact_value[:, :exact] = torch.cat((all_value[:, :sinks], recent_value[:, moved:]), 1)


def _encode_tokens(
    tiles: Tensor,
    balance: Tensor,
    key: Tensor,
    value: Tensor,
    plan: _RowPlan,
    layout: formats.TileFormat,
) -> None:
    """Encode tokens ``[kv_heads, n, dim]`` behind the ``plan.quantized`` ones in tiles."""
    pages, slot = plan.pages, plan.quantized % _TILE
    if slot:
        space = min(_TILE - slot, key.shape[1])
        _complete_tile(tiles[pages[0]], slot, balance, key[:, :space], value[:, :space], layout)
        pages, key, value = pages[1:], key[:, space:], value[:, space:]
    if pages:
        tiles[pages] = encode.quantize_tile(
            key.unflatten(1, (-1, _TILE)).transpose(0, 1),
            value.unflatten(1, (-1, _TILE)).transpose(0, 1),
            balance.unsqueeze(0),
            layout.key_bits,
            layout.value_bits,
        )


def _complete_tile(
    record: Tensor,
    slot: int,
    balance: Tensor,
    key: Tensor,
    value: Tensor,
    layout: formats.TileFormat,
) -> None:
    """Encode tokens ``[kv_heads, n, dim]`` into the slots from ``slot`` on of one record."""
    end = slot + key.shape[1]
    if layout.is_pass_through:
        _write_raw(record, layout.key_code_offset, slot, key)
        _write_raw(record, layout.value_code_offset, slot, value)
        return
    parts = read_record(record, layout)
    scale, codes = encode.encode_keys(key, balance, parts.mean, parts.mean_scale, layout.key_bits)
    parts.key_scale[:, slot:end], parts.key_codes[:, slot:end] = scale, codes
    scale, codes = encode.encode_values(value, layout.value_bits)
    parts.value_scale[:, slot:end], parts.value_codes[:, slot:end] = scale, codes
    _write(record, layout.key_scale_offset, parts.key_scale.view(torch.uint8))
    _write(record, layout.key_code_offset, packing.pack(parts.key_codes, "key", layout.key_bits))
    _write(record, layout.value_scale_offset, parts.value_scale.view(torch.uint8))
    codes = packing.pack(parts.value_codes, "value", layout.value_bits)
    _write(record, layout.value_code_offset, codes)


def _write(record: Tensor, offset: int, data: Tensor) -> None:
    record[:, offset : offset + data.shape[1]] = data


def _write_raw(record: Tensor, offset: int, slot: int, x: Tensor) -> None:
    data = x.flatten(1).contiguous().view(torch.uint8)
    _write(record, offset + slot * x.shape[2] * x.element_size(), data)
