"""Bit layout of codes: 64 tokens of one KV head to bytes and back (docs/formats.md, "Packing")."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["key", "value"]

_UNITS_IN_GROUP = {2: 4, 3: 8, 4: 2}
_LINE = 64


def _to_units(codes: Tensor, kind: Kind) -> Tensor:
    """``[..., 64, dim]`` to ``[..., dim, 64]``: units by lane and element."""
    lead, dim = codes.shape[:-2], codes.shape[-1]
    if kind == "key":
        parts = codes.reshape(*lead, 4, 16, dim // 4, 4).transpose(-3, -2)
    else:
        parts = codes.reshape(*lead, 16, 4, dim // 16, 16)
        parts = parts.movedim((-2, -4, -1, -3), (-4, -3, -2, -1))
    return parts.reshape(*lead, dim, _LINE)


def _from_units(units: Tensor, kind: Kind) -> Tensor:
    lead, dim = units.shape[:-2], units.shape[-2]
    if kind == "key":
        parts = units.reshape(*lead, 4, dim // 4, 16, 4).transpose(-3, -2)
    else:
        parts = units.reshape(*lead, dim // 16, 16, 16, 4)
        parts = parts.movedim((-4, -3, -2, -1), (-2, -4, -1, -3))
    return parts.reshape(*lead, _LINE, dim)


def pack(codes: Tensor, kind: Kind, bits: int) -> Tensor:
    """Pack the codes of tiles.

    Args:
        codes: uint8 ``[..., 64, dim]``, each below ``2 ** bits``.
        kind: layout of keys or of values.
        bits: 2, 3 or 4.

    Returns:
        uint8 ``[..., 8 * dim * bits]``.
    """
    groups = _to_units(codes, kind).unflatten(-2, (-1, _UNITS_IN_GROUP[bits]))
    if bits == 3:
        low = groups & 3
        lines = [_join(low[..., :4, :], 2), _join(low[..., 4:, :], 2), _join(groups >> 2, 1)]
    else:
        lines = [_join(groups, bits)]
    return torch.stack(lines, -2).flatten(-3)


def unpack(packed: Tensor, kind: Kind, bits: int) -> Tensor:
    """Undo `pack`: uint8 ``[..., 8 * dim * bits]`` to uint8 ``[..., 64, dim]``."""
    if bits == 3:
        lines = packed.unflatten(-1, (-1, 3, _LINE))
        low = torch.cat((_split(lines[..., 0, :], 2), _split(lines[..., 1, :], 2)), -2)
        groups = low | _split(lines[..., 2, :], 1) << 2
    else:
        groups = _split(packed.unflatten(-1, (-1, _LINE)), bits)
    return _from_units(groups.flatten(-3, -2), kind)


def _join(units: Tensor, bits: int) -> Tensor:
    """Merge units ``[..., n, 64]`` into one line ``[..., 64]``, unit u at bit ``bits * u``."""
    line = units[..., 0, :]
    for u in range(1, units.shape[-2]):
        line = line | units[..., u, :] << bits * u
    return line


def _split(lines: Tensor, bits: int) -> Tensor:
    mask = (1 << bits) - 1
    return torch.stack([lines >> bits * u & mask for u in range(8 // bits)], -2)
