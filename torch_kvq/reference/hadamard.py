"""The Hadamard transform of the format: matrix pieces and the normative order of evaluation."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

_PALEY_ORDERS = {3: 12, 5: 20, 7: 28}
Matrix = tuple[tuple[float, ...], ...]


class Factors(NamedTuple):
    """Shape of the transform of one vector: ``blocks`` times ``paley ⊗ Sylvester(sylvester)``."""

    blocks: int
    paley: int
    sylvester: int


def factors(dim: int) -> Factors:
    """Split a dimension into blocks, the order of the Paley matrix (1: none) and a power of two.

    Example:
        >>> factors(96), factors(144)
        (Factors(blocks=1, paley=12, sylvester=8), Factors(blocks=9, paley=1, sylvester=16))
    """
    power = dim & -dim
    odd = dim // power
    paley = _PALEY_ORDERS.get(odd, 1)
    if paley > 1:
        return Factors(1, paley, dim // paley)
    return Factors(odd, 1, power)


def _quadratic_character(modulus: int) -> list[float]:
    squares = {i * i % modulus for i in range(1, modulus)}
    return [0.0] + [1.0 if i in squares else -1.0 for i in range(1, modulus)]


def _paley_core(modulus: int, first_column: float) -> list[list[float]]:
    chi = _quadratic_character(modulus)
    rows = [[0.0] + [1.0] * modulus]
    for i in range(modulus):
        rows.append([first_column] + [chi[(j - i) % modulus] for j in range(modulus)])
    return rows


def _paley_first(order: int) -> Matrix:
    core = _paley_core(order - 1, -1.0)
    return tuple(
        tuple(1.0 if i == j else entry for j, entry in enumerate(row)) for i, row in enumerate(core)
    )


def _paley_second(order: int) -> Matrix:
    pairs = {0.0: ((1, -1), (-1, -1)), 1.0: ((1, 1), (1, -1)), -1.0: ((-1, -1), (-1, 1))}
    core = _paley_core(order // 2 - 1, 1.0)
    return tuple(
        tuple(float(entry) for cell in row for entry in pairs[cell][half])
        for row in core
        for half in (0, 1)
    )


@functools.cache
def paley(order: int) -> Matrix:
    """Rows of the Hadamard matrix of order 12, 20 or 28, entries ±1.

    Example:
        >>> paley(12)[1][:5]
        (-1.0, 1.0, 1.0, -1.0, 1.0)
    """
    return _paley_second(order) if order == 28 else _paley_first(order)


def _butterflies(x: Tensor) -> Tensor:
    order = x.shape[-1]
    for distance in (1 << i for i in range(order.bit_length() - 1)):
        pairs = x.unflatten(-1, (order // (2 * distance), 2, distance))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((first + second, first - second), -2).flatten(-3)
    return x


def _multiply_paley(x: Tensor, transposed: bool) -> Tensor:
    matrix = torch.tensor(paley(x.shape[-2]), dtype=x.dtype, device=x.device)
    columns = (matrix if transposed else matrix.T).unsqueeze(-1)
    total = columns[0] * x[..., :1, :]
    for j in range(1, x.shape[-2]):
        total = total + columns[j] * x[..., j : j + 1, :]
    return total


def transform(x: Tensor, inverse: bool = False) -> Tensor:
    """Orthonormal Hadamard transform of the last dimension in the order of docs/formats.md.

    Args:
        x: float32 ``[..., dim]``.
        inverse: apply the transpose.

    Returns:
        float32 ``[..., dim]``.
    """
    shape = factors(x.shape[-1])
    x = x.unflatten(-1, shape)
    if inverse and shape.paley > 1:
        x = _multiply_paley(x, transposed=True)
    x = _butterflies(x)
    if not inverse and shape.paley > 1:
        x = _multiply_paley(x, transposed=False)
    return (x * (1 / math.sqrt(shape.paley * shape.sylvester))).flatten(-3)
