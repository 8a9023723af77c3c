"""The Hadamard transform."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_kvq
from tests.cases import DIMS, DTYPES
from tests.ops.compare import assert_same
from torch_kvq import formats, reference
from torch_kvq.reference import hadamard

ALL_DIMS = tuple(range(32, 513, 16))


def dense(dim: int) -> Tensor:
    """The matrix by its definition, float64."""
    blocks, paley, order = hadamard.factors(dim)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < order:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    if paley > 1:
        matrix = torch.kron(torch.tensor(hadamard.paley(paley), dtype=torch.float64), matrix)
    return torch.block_diag(*[matrix / len(matrix) ** 0.5] * blocks)


def sample(dim: int, dtype: torch.dtype = torch.float32, rows: int = 9) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)


@pytest.mark.parametrize("dim", ALL_DIMS)
def test_reference_is_the_matrix(dim: int) -> None:
    x, matrix = sample(dim), dense(dim)
    torch.testing.assert_close(reference.fwht(x).double(), x.double() @ matrix.T, rtol=0, atol=2e-6)
    inverse = reference.fwht(x, inverse=True)
    torch.testing.assert_close(inverse.double(), x.double() @ matrix, rtol=0, atol=2e-6)


@pytest.mark.parametrize("inverse", (False, True))
@pytest.mark.parametrize("dim", ALL_DIMS)
def test_kernel_is_bit_equal(tier: str, dim: int, inverse: bool) -> None:
    x, signs = sample(dim), formats.signs("key", dim)
    assert_same(torch_kvq.fwht(x, None, inverse), reference.fwht(x, None, inverse))
    assert_same(torch_kvq.fwht(x, signs, inverse), reference.fwht(x, signs, inverse))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_kernel_rounds_once(tier: str, dim: int, dtype: torch.dtype) -> None:
    x = sample(dim, dtype)
    out = torch_kvq.fwht(x, formats.signs("value", dim))
    assert out.dtype == dtype
    assert_same(out, reference.fwht(x.float(), formats.signs("value", dim)).to(dtype))


def test_signs_come_first_and_last(capability: str) -> None:
    x, signs = sample(96), torch.linspace(-2, 2, 96)
    assert_same(torch_kvq.fwht(x, signs), torch_kvq.fwht(x * signs))
    assert_same(torch_kvq.fwht(x, signs, True), torch_kvq.fwht(x, inverse=True) * signs)


@pytest.mark.parametrize("shape", ((64,), (0, 64), (3, 0, 64), (1, 64), (2, 3, 4, 64)))
def test_shapes(capability: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert_same(torch_kvq.fwht(x), reference.fwht(x))


def test_strides(capability: str) -> None:
    x = torch.randn(5, 7, 200)
    views = (x[..., 3:67], x[::2, :, :128], x.transpose(0, 1)[..., :64], x[..., :128:2])
    for view in (*views, torch.randn(64, 11).T, torch.randn(1, 1, 48).expand(3, 2, 48)):
        assert_same(torch_kvq.fwht(view), reference.fwht(view.contiguous()))
    signs = torch.randn(128)[::2]
    assert_same(torch_kvq.fwht(x[..., :64], signs), reference.fwht(x[..., :64], signs.clone()))


def test_input_is_not_written(capability: str) -> None:
    x = sample(64)
    before = x.clone()
    torch_kvq.fwht(x, formats.signs("key", 64))
    assert_same(x, before)
