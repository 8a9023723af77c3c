"""Argument checks of `tiered_attention`; ``csrc/tiered_attention.cpp`` is the C++ twin.

`check_tiers` reads no data, so it holds under tracing; `check_near` reads it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_kvq import _checks, formats


def check_tiers(
    near_key: Tensor,
    near_value: Tensor,
    near_index: Tensor,
    near_count: Tensor,
    tiles: Tensor,
    block_table: Tensor,
    promoted: Tensor,
    lengths: Tensor,
    balance: Tensor | None,
    far: str,
    sink_tokens: int,
    candidates: int,
) -> None:
    """Check the state of a tiered layer against itself."""
    _checks.check_rank(4, near_key=near_key, near_value=near_value)
    _checks.check_float(near_key=near_key)
    _checks.check_dtype(near_key.dtype, near_value=near_value)
    _checks.check_shape(
        "near_value",
        near_value,
        *((i, near_key.shape[i], f"near_key.shape[{i}]") for i in range(3)),
    )
    batch, kv_heads, capacity, key_dim = near_key.shape
    record_bytes = formats.far_record_bytes(far, key_dim, near_value.shape[-1])
    _checks.check_rank(3, near_index=near_index, tiles=tiles, promoted=promoted)
    _checks.check_rank(2, near_count=near_count, block_table=block_table, lengths=lengths)
    _checks.check_dtype(torch.uint8, tiles=tiles)
    _checks.check_dtype(torch.int64, promoted=promoted)
    _checks.check_dtype(
        torch.int32,
        near_index=near_index,
        near_count=near_count,
        block_table=block_table,
        lengths=lengths,
    )
    owners = ((0, batch, "batch"), (1, kv_heads, "kv heads"))
    _checks.check_shape("near_index", near_index, *owners, (2, capacity, "near_key.shape[2]"))
    _checks.check_shape("near_count", near_count, *owners)
    _checks.check_shape("tiles", tiles, owners[1], (2, record_bytes, "record_bytes"))
    _checks.check_shape("block_table", block_table, owners[0])
    _checks.check_shape("promoted", promoted, *owners, (2, block_table.shape[1], "max_pages"))
    _checks.check_shape("lengths", lengths, owners[0], (1, 3, "start, length, quantized"))
    if (balance is not None) != (far == "tile4"):
        given = "none" if balance is None else f"shape {tuple(balance.shape)}"
        raise ValueError(
            f"balance belongs to far='tile4' and to no other, got {given} with {far!r}"
        )
    if balance is not None:
        _checks.check_rank(3, balance=balance)
        _checks.check_dtype(torch.float32, balance=balance)
        _checks.check_shape("balance", balance, *owners, (2, key_dim, "key dim"))
    _checks.check_not_negative(sink_tokens=sink_tokens)
    if not 0 <= candidates <= formats.MAX_CANDIDATES:
        raise ValueError(f"candidates must be from 0 to {formats.MAX_CANDIDATES}, got {candidates}")
    _checks.check_same_device(
        near_key=near_key,
        near_value=near_value,
        near_index=near_index,
        near_count=near_count,
        tiles=tiles,
        block_table=block_table,
        promoted=promoted,
        lengths=lengths,
        balance=balance,
    )


def check_near(
    near_index: Tensor,
    near_count: Tensor,
    promoted: Tensor,
    lengths: Tensor,
    max_pages: int,
    sink_tokens: int,
) -> None:
    """Raise unless near tokens exist and those that are also far are the promoted ones.

    Raises:
        IndexError: lengths that do not fit the pages, a count or an index outside its range.
        ValueError: a near token with a far copy that is not promoted, or a promoted one that is
            not near.
    """
    _checks.check_lengths(lengths, torch.iinfo(torch.int64).max, max_pages, sink_tokens)
    capacity = near_index.shape[2]
    for row, (start, length, quantized) in enumerate(lengths.tolist()):
        tokens = max(length - start, 0)
        for head, count in enumerate(near_count[row].tolist()):
            if not 0 <= count <= capacity:
                raise IndexError(
                    f"near_count[{row}, {head}] must be in [0, {capacity}], got {count}"
                )
            bits = promoted_bits(promoted[row, head], quantized)
            # Tokens that may still be named: promoted ones, and those that are not far.
            unnamed = torch.ones(tokens, dtype=torch.bool)
            unnamed[sink_tokens : sink_tokens + quantized] = bits
            for slot, token in enumerate(near_index[row, head, :count].tolist()):
                if not -1 <= token < tokens:
                    raise IndexError(
                        f"near_index[{row}, {head}, {slot}] must be in [-1, {tokens}), got {token}"
                    )
                if token < 0:
                    continue
                if not unnamed[token]:
                    raise ValueError(
                        f"near_index[{row}, {head}, {slot}] = {token} counts twice: it is near in "
                        "two slots, or far without its bit in promoted"
                    )
                unnamed[token] = False
            missing = unnamed[sink_tokens : sink_tokens + quantized].nonzero()
            if len(missing):
                token = int(missing[0]) + sink_tokens
                raise ValueError(
                    f"promoted[{row}, {head}] has the bit of token {token} set, which is not near"
                )


def promoted_bits(promoted: Tensor, quantized: int) -> Tensor:
    """Bits of ``[..., max_pages]`` masks as bool ``[..., quantized]``, lowest bit first.

    Example:
        >>> promoted_bits(torch.tensor([5, 1]), 66).nonzero().flatten()
        tensor([ 0,  2, 64])
    """
    shifts = torch.arange(formats.TILE_TOKENS, device=promoted.device)
    return (promoted.unsqueeze(-1) >> shifts & 1).bool().flatten(-2)[..., :quantized]
