"""Encoding and decoding of tiles."""

from __future__ import annotations

import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import torch_kvq
from tests.cases import BITS, DIM_PAIRS, DIMS, DTYPES, Bits
from tests.ops.compare import assert_same
from torch_kvq import formats, reference

SHAPES = (*((dim, dim) for dim in DIMS), *DIM_PAIRS)
LOSS = {4: 0.0092, 3: 0.0339, 2: 0.1154}
"""Normalised squared error of each width on Gaussian data."""


def tiles(
    key_dim: int, value_dim: int, dtype: torch.dtype = torch.float32, seed: int = 0, count: int = 2
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(count, 3, 64, key_dim, generator=generator)
    key = key * torch.rand(3, 1, key_dim, generator=generator) * 4
    key += torch.randn(3, 1, key_dim, generator=generator)
    value = torch.randn(count, 3, 64, value_dim, generator=generator)
    return key.to(dtype), value.to(dtype)


def extremes() -> dict[str, Tensor]:
    """Tiles ``[1, 1, 64, 64]`` at the edge of what the encoder reads."""
    base = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(5))
    mixed = base.clone()
    mixed[0, 0, 3, 7], mixed[0, 0, 9, 1], mixed[0, 0, 20, 20] = torch.inf, -torch.inf, torch.nan
    return {
        "zeros": base * 0,
        "negative zeros": -(base * 0),
        "tiny": base * 1e-30,
        "subnormal": base * 1e-42,
        "rms underflows": base * 1e-23,
        "small scales": base * 3e-7,
        "mean scale underflows": torch.full_like(base, 3e-6),
        "mean scale rounds down": torch.full_like(base, 1.06e-5) + base * 1e-7,
        "large": base * 3e4,
        "largest": base.sign() * 65504,
        "beyond": base * 1e30,
        "equal": base[:, :, :1].expand(1, 1, 64, 64).clone(),
        "on the midpoints": (base * 12).round() / 2,
        "not finite": mixed,
        "infinite": torch.full_like(base, torch.inf),
    }


EXTREMES = extremes()


class Encoded(NamedTuple):
    """Tiles and what the reference makes of them; shared between tests."""

    key: Tensor
    value: Tensor
    balance: Tensor
    record: Tensor
    shared_record: Tensor
    decoded: tuple[Tensor, Tensor]


@functools.cache
def encoded(dims: tuple[int, int], bits: Bits) -> Encoded:
    """Tiles of a shape in one of the dtypes; the shared record uses the first balance for all."""
    key, value = tiles(*dims, DTYPES[sum(dims) // 16 % 3])
    balance = reference.key_balance(key)
    record = reference.quantize_tile(key, value, balance, *bits)
    shared = reference.quantize_tile(key, value, balance[:1], *bits)
    decoded = reference.dequantize_tile(record, balance, *bits, dims[1], key.dtype)
    return Encoded(key, value, balance, record, shared, decoded)


@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize("dims", SHAPES, ids=str)
def test_records_are_bit_equal(tier: str, dims: tuple[int, int], bits: Bits) -> None:
    key, value, balance, record, shared_record, _ = encoded(dims, bits)
    assert_same(torch_kvq.key_balance(key), balance)
    assert_same(torch_kvq.quantize_tile(key, value, balance, *bits), record)
    assert_same(torch_kvq.quantize_tile(key, value, balance[:1], *bits), shared_record)


@pytest.mark.parametrize("bits", BITS, ids=str)
@pytest.mark.parametrize("dims", SHAPES, ids=str)
def test_decoding_agrees(tier: str, dims: tuple[int, int], bits: Bits) -> None:
    key, _, balance, record, _, expected = encoded(dims, bits)
    decoded = torch_kvq.dequantize_tile(record, balance, *bits, dims[1], key.dtype)
    for out, wanted in zip(decoded, expected, strict=True):
        assert out.dtype == key.dtype
        # The float32 results may differ in the last bit, and may then round apart.
        torch.testing.assert_close(out, wanted, rtol=2 * torch.finfo(key.dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pass_through_returns_its_input(dtype: torch.dtype) -> None:
    key, value = tiles(64, 96, dtype)
    balance = torch.full((1, 3, 64), torch.nan)
    record = torch_kvq.quantize_tile(key, value, balance, 16, 16)
    for out, raw in zip(
        torch_kvq.dequantize_tile(record, balance, 16, 16, 96, dtype), (key, value), strict=True
    ):
        assert_same(out, raw)


@pytest.mark.parametrize("bits", (4, 3, 2))
@pytest.mark.parametrize("dim", (64, 96, 128, 144))
def test_loss_is_that_of_the_codebook(dim: int, bits: int) -> None:
    key, value = torch.randn(2, 8, 4, 64, dim, generator=torch.Generator().manual_seed(bits))
    balance = reference.key_balance(key.transpose(0, 1).reshape(1, 4, -1, dim))
    record = torch_kvq.quantize_tile(key, value, balance, bits, bits)
    decoded = torch_kvq.dequantize_tile(record, balance, bits, bits)
    for out, raw in zip(decoded, (key, value), strict=True):
        loss = float((out - raw).square().sum() / raw.square().sum())
        assert 0.6 * LOSS[bits] < loss < 1.005 * LOSS[bits]


def test_balance_evens_out_a_strong_channel() -> None:
    key, value = tiles(64, 64)
    key[..., 9] *= 100
    balance = torch_kvq.key_balance(key)
    ones = torch.ones_like(balance)
    weak = [c for c in range(64) if c != 9]
    losses = []
    for used in (balance, ones):
        record = torch_kvq.quantize_tile(key, value, used)
        decoded, _ = torch_kvq.dequantize_tile(record, used)
        losses.append(float((decoded - key)[..., weak].norm()))
    assert losses[0] < 0.5 * losses[1]


def test_a_constant_of_the_keys_costs_nothing() -> None:
    key, value = tiles(64, 64)
    shifted = key + 30 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    losses = []
    for used in (key, shifted):
        balance = torch_kvq.key_balance(used)
        decoded, _ = torch_kvq.dequantize_tile(
            torch_kvq.quantize_tile(used, value, balance), balance
        )
        losses.append(float((decoded - used).norm()))
    assert losses[1] < 1.3 * losses[0]


@functools.cache
def encoded_extreme(name: str, bits: int) -> tuple[Tensor, Tensor]:
    """Balance and record of the reference."""
    x = EXTREMES[name]
    balance = reference.key_balance(x)
    return balance, reference.quantize_tile(x, x, balance, bits, bits)


@pytest.mark.parametrize("bits", (4, 3, 2))
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_are_bit_equal(tier: str, name: str, bits: int) -> None:
    x, (balance, record) = EXTREMES[name], encoded_extreme(name, bits)
    assert_same(torch_kvq.key_balance(x), balance)
    assert_same(torch_kvq.quantize_tile(x, x, balance, bits, bits), record)


@pytest.mark.parametrize("name", EXTREMES)
def test_extremes_decode_to_finite_numbers(name: str) -> None:
    x = EXTREMES[name]
    balance = torch_kvq.key_balance(x)
    assert bool(balance.isfinite().all()) and bool((balance > 0).all())
    for out in torch_kvq.dequantize_tile(torch_kvq.quantize_tile(x, x, balance), balance):
        assert bool(out.isfinite().all())


def test_infinities_stay_in_their_tile() -> None:
    key, value = tiles(64, 64)
    balance = torch_kvq.key_balance(key)
    clean = torch_kvq.quantize_tile(key, value, balance)
    key[0, :, 5, 3], value[0, :, 6, 4], key[0, :, 7, 7] = torch.inf, -torch.inf, torch.nan
    record = torch_kvq.quantize_tile(key, value, balance)
    assert_same(record[1], clean[1])
    decoded = torch_kvq.dequantize_tile(record, balance)
    assert all(bool(out.isfinite().all()) for out in decoded)
    others = [t for t in range(64) if t != 6]
    assert_same(
        decoded[1][0, :, others], torch_kvq.dequantize_tile(clean, balance)[1][0, :, others]
    )


@pytest.mark.parametrize("tokens", (1, 2, 63, 64, 100, 191, 192, 193, 300))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_balance_is_bit_equal(tier: str, tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    key = (torch.randn(2, 3, tokens, 80, generator=generator) * 3 + 1).to(dtype)
    balance = torch_kvq.key_balance(key)
    assert_same(balance, reference.key_balance(key))
    assert_same(balance, torch_kvq.key_balance(key[:, :, : formats.BALANCE_TOKENS]))


def test_balance_is_the_fourth_root_of_the_variance() -> None:
    tokens, generator = formats.BALANCE_TOKENS, torch.Generator().manual_seed(0)
    key = torch.randn(1, 1, tokens, 64, generator=generator, dtype=torch.float64)
    key *= torch.linspace(0.5, 4, 64)
    wanted = key.var(2, correction=0) ** -0.25
    torch.testing.assert_close(torch_kvq.key_balance(key.float()).double(), wanted)
    key[..., 0] = 7.0
    floor = formats.VARIANCE_FLOOR * key.var(2, correction=0).mean(-1)
    balance = torch_kvq.key_balance(key.float()).double()
    torch.testing.assert_close(balance[..., 0], floor**-0.25)
    assert_same(torch_kvq.key_balance(torch.full((1, 1, 9, 32), 2.5)), torch.ones(1, 1, 32))


def test_strides(capability: str) -> None:
    key, value = tiles(64, 96, torch.float16)
    balance = torch_kvq.key_balance(key)
    wanted = torch_kvq.quantize_tile(key, value, balance)
    wide = torch.full((2, 3, 64, 200), torch.nan, dtype=torch.float16)
    wide[..., 5:69], wide[..., 101:197] = key, value
    spread = balance.repeat_interleave(2, -1)[..., ::2]
    for views in (
        (wide[..., 5:69], wide[..., 101:197], spread),
        (key.mT.contiguous().mT, value.transpose(1, 2).contiguous().transpose(1, 2), balance),
    ):
        assert_same(torch_kvq.quantize_tile(*views), wanted)
        assert_same(torch_kvq.key_balance(views[0]), balance)
    one = torch_kvq.quantize_tile(key[:1], value[:1], balance[:1])
    same = torch_kvq.quantize_tile(
        key[:1].expand(4, -1, -1, -1),
        value[:1].expand(4, -1, -1, -1),
        balance[:1].expand(4, -1, -1),
    )
    assert_same(same, one.expand(4, -1, -1))
    padded = torch.zeros(5, 3, wanted.shape[2] + 3, dtype=torch.uint8)
    padded[1::2, :, 3:] = wanted
    decoded = torch_kvq.dequantize_tile(padded[1::2, :, 3:], spread, value_dim=96)
    for out, same in zip(
        decoded, torch_kvq.dequantize_tile(wanted, balance, value_dim=96), strict=True
    ):
        assert_same(out, same)


def test_no_tiles(capability: str) -> None:
    record = torch_kvq.quantize_tile(
        torch.empty(0, 3, 64, 64), torch.empty(0, 3, 64, 32), torch.ones(1, 3, 64)
    )
    assert record.shape == (0, 3, formats.TileFormat(64, 32, 4, 4).record_bytes)
    key, value = torch_kvq.dequantize_tile(record, torch.ones(1, 3, 64), value_dim=32)
    assert key.shape == (0, 3, 64, 64) and value.shape == (0, 3, 64, 32)
