"""Argument checks shared by the references and the fake kernels; ``csrc/checks.h`` is the C++ twin.

Shape checks read no data, so they hold under tracing; `check_lengths` and `check_pages` read the
bookkeeping tensors and belong to the references.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_kvq import formats

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
PRECISIONS = ("exact", "fast")


def check_float(**tensors: Tensor) -> None:
    """Raise ValueError for a tensor that is not float32, float16 or bfloat16."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} must be float32, float16 or bfloat16, got {tensor.dtype}")


def check_rank(rank: int, **tensors: Tensor) -> None:
    """Raise ValueError for a tensor without exactly ``rank`` dimensions."""
    for name, tensor in tensors.items():
        if tensor.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimensions, got shape {tuple(tensor.shape)}")


def check_dtype(dtype: torch.dtype, **tensors: Tensor) -> None:
    """Raise ValueError for a tensor of another dtype."""
    for name, tensor in tensors.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")


def check_contiguous(**tensors: Tensor) -> None:
    """Raise ValueError for a tensor that is written in place but not contiguous."""
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} is written in place and must be contiguous, got shape "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}"
            )


def check_shape(name: str, tensor: Tensor, *expected: tuple[int, int, str]) -> None:
    """Raise ValueError where dimension i is not the expected size of its owner."""
    for dim, size, owner in expected:
        if tensor.shape[dim] != size:
            raise ValueError(
                f"{name}.shape[{dim}] must be {size} ({owner}), got shape {tuple(tensor.shape)}"
            )


def check_same_device(**tensors: Tensor | None) -> None:
    """Raise ValueError when the tensors are on different devices."""
    given = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(given.values())) > 1:
        raise ValueError(
            "all tensors must be on one device, got "
            + ", ".join(f"{name} on {device}" for name, device in given.items())
        )


def check_not_negative(**values: int) -> None:
    """Raise ValueError for a negative count."""
    for name, value in values.items():
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")


def check_new_tokens(key: Tensor, value: Tensor) -> None:
    """Check a pair of new keys ``[batch, kv_heads, tokens, dim]`` and values."""
    check_rank(4, key=key, value=value)
    check_float(key=key, value=value)
    check_dtype(key.dtype, value=value)
    check_shape("value", value, *((i, key.shape[i], f"key.shape[{i}]") for i in range(3)))
    formats.check_head_dim("key.shape[-1]", key.shape[-1])
    formats.check_head_dim("value.shape[-1]", value.shape[-1])


def check_transform(x: Tensor, signs: Tensor | None) -> None:
    """Check the arguments of the Hadamard transform."""
    check_float(x=x)
    if x.dim() == 0:
        raise ValueError("x must have at least 1 dimension, got shape ()")
    formats.check_head_dim("x.shape[-1]", x.shape[-1])
    if signs is not None:
        check_rank(1, signs=signs)
        check_dtype(torch.float32, signs=signs)
        check_shape("signs", signs, (0, x.shape[-1], "x.shape[-1]"))
    check_same_device(x=x, signs=signs)


def check_key(key: Tensor) -> None:
    """Check keys ``[batch, kv_heads, tokens, dim]`` that a balance is taken from."""
    check_rank(4, key=key)
    check_float(key=key)
    formats.check_head_dim("key.shape[-1]", key.shape[-1])


def check_balance(balance: Tensor, tiles: int, kv_heads: int, key_dim: int) -> None:
    """Check the balance of tiles, one for each or one for all of them."""
    check_rank(3, balance=balance)
    check_dtype(torch.float32, balance=balance)
    check_shape("balance", balance, (1, kv_heads, "kv heads"), (2, key_dim, "key dim"))
    if balance.shape[0] not in (1, tiles):
        raise ValueError(f"balance.shape[0] must be 1 or {tiles}, got shape {tuple(balance.shape)}")


def check_tile_input(
    key: Tensor, value: Tensor, balance: Tensor, key_bits: int, value_bits: int
) -> formats.TileFormat:
    """Check the input of the encoder and return its record format."""
    check_new_tokens(key, value)
    check_shape("key", key, (2, formats.TILE_TOKENS, "tokens of a tile"))
    check_balance(balance, key.shape[0], key.shape[1], key.shape[3])
    check_same_device(key=key, value=value, balance=balance)
    return formats.TileFormat(
        key.shape[3], value.shape[3], key_bits, value_bits, key.element_size()
    )


def check_state(
    tiles: Tensor,
    block_table: Tensor,
    balance: Tensor,
    exact_key: Tensor,
    exact_value: Tensor,
    lengths: Tensor,
    key_bits: int,
    value_bits: int,
    sink_tokens: int,
) -> formats.TileFormat:
    """Check the state of a layer against itself and return its record format."""
    check_new_exact(exact_key, exact_value)
    batch, kv_heads, _, key_dim = exact_key.shape
    layout = formats.TileFormat(
        key_dim, exact_value.shape[-1], key_bits, value_bits, exact_key.element_size()
    )
    check_rank(3, tiles=tiles, balance=balance)
    check_rank(2, block_table=block_table, lengths=lengths)
    check_dtype(torch.uint8, tiles=tiles)
    check_dtype(torch.int32, block_table=block_table, lengths=lengths)
    check_dtype(torch.float32, balance=balance)
    check_shape("tiles", tiles, (1, kv_heads, "kv heads"), (2, layout.record_bytes, "record_bytes"))
    check_shape("block_table", block_table, (0, batch, "batch"))
    check_shape("lengths", lengths, (0, batch, "batch"), (1, 3, "start, length, quantized"))
    check_shape(
        "balance", balance, (0, batch, "batch"), (1, kv_heads, "kv heads"), (2, key_dim, "key dim")
    )
    check_not_negative(sink_tokens=sink_tokens)
    check_same_device(
        tiles=tiles,
        block_table=block_table,
        balance=balance,
        exact_key=exact_key,
        exact_value=exact_value,
        lengths=lengths,
    )
    return layout


def check_new_exact(exact_key: Tensor, exact_value: Tensor) -> None:
    """Check the pair of exact buffers; their capacity may be zero."""
    check_rank(4, exact_key=exact_key, exact_value=exact_value)
    check_float(exact_key=exact_key)
    check_dtype(exact_key.dtype, exact_value=exact_value)
    check_shape(
        "exact_value",
        exact_value,
        *((i, exact_key.shape[i], f"exact_key.shape[{i}]") for i in range(3)),
    )


def check_query(
    query: Tensor,
    exact_key: Tensor,
    attn_mask: Tensor | None,
    sinks: Tensor | None,
    sliding_window: int | None,
    softcap: float | None,
    precision: str,
) -> None:
    """Check the query side of an attention call against the layer's exact keys."""
    check_rank(4, query=query)
    check_float(query=query)
    batch, kv_heads, _, key_dim = exact_key.shape
    check_shape("query", query, (0, batch, "batch"), (3, key_dim, "key dim"))
    heads = query.shape[1]
    if heads % kv_heads:
        raise ValueError(f"query heads must be a multiple of {kv_heads} kv heads, got {heads}")
    if attn_mask is not None:
        check_rank(4, attn_mask=attn_mask)
        if attn_mask.dtype != torch.bool:
            check_float(attn_mask=attn_mask)
        for dim, size in enumerate((batch, heads, query.shape[2])):
            if attn_mask.shape[dim] not in (1, size):
                raise ValueError(
                    f"attn_mask.shape[{dim}] must be 1 or {size}, "
                    f"got shape {tuple(attn_mask.shape)}"
                )
    if sinks is not None:
        check_rank(1, sinks=sinks)
        check_float(sinks=sinks)
        check_shape("sinks", sinks, (0, heads, "query heads"))
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be 'exact' or 'fast', got {precision!r}")
    check_same_device(query=query, exact_key=exact_key, attn_mask=attn_mask, sinks=sinks)


def check_lengths(lengths: Tensor, capacity: int, max_pages: int, sink_tokens: int) -> None:
    """Raise IndexError when a row of ``lengths`` does not fit the buffers it describes."""
    for row, (start, length, quantized) in enumerate(lengths.tolist()):
        tokens = max(length - start, 0)
        if not (
            start >= 0
            and length >= 0
            and 0 <= quantized <= max(tokens - sink_tokens, 0)
            and tokens - quantized <= capacity
            and -(-quantized // formats.TILE_TOKENS) <= max_pages
        ):
            raise IndexError(
                f"lengths[{row}] = (start {start}, length {length}, quantized {quantized}) "
                f"does not fit {max_pages} pages, {capacity} exact tokens and "
                f"sink_tokens={sink_tokens}"
            )


def check_pages(block_table: Tensor, row: int, first: int, end: int, total: int) -> list[int]:
    """Return the pages ``first`` to ``end`` of a row; IndexError for one that does not exist."""
    ids: list[int] = block_table[row, first:end].tolist()
    for n, page in enumerate(ids, first):
        if not 0 <= page < total:
            raise IndexError(f"block_table[{row}, {n}] must be in [0, {total}), got {page}")
    return ids


def check_far_input(key: Tensor, value: Tensor) -> formats.FarFormat:
    """Check the input of the far encoder and return its record format."""
    check_new_tokens(key, value)
    check_shape("key", key, (2, formats.TILE_TOKENS, "tokens of a tile"))
    check_same_device(key=key, value=value)
    return formats.FarFormat(key.shape[3], value.shape[3])


def check_far_records(
    tiles: Tensor, key_dim: int, value_dim: int, dtype: torch.dtype
) -> formats.FarFormat:
    """Check far records that are decoded and return their format."""
    check_rank(3, tiles=tiles)
    check_dtype(torch.uint8, tiles=tiles)
    if dtype not in FLOATS:
        raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
    layout = formats.FarFormat(key_dim, value_dim)
    check_shape("tiles", tiles, (2, layout.record_bytes, "record_bytes"))
    return layout


def check_columns(attn_mask: Tensor, positions: int) -> None:
    """Raise ValueError for a mask with fewer columns than the longest row has positions."""
    if attn_mask.shape[3] < positions:
        raise ValueError(
            f"attn_mask.shape[3] must be at least {positions} (longest row), "
            f"got shape {tuple(attn_mask.shape)}"
        )
