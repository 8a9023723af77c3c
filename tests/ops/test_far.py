"""Far records: every code, the edges of its range, and what they cost."""

from __future__ import annotations

import hashlib
import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import torch_kvq
from tests import cases, tiers
from tests.cases import Case
from tests.ops.compare import assert_same, head_error
from tests.ops.test_robustness import row_sliced, spread, swapped
from torch_kvq import reference
from torch_kvq.formats import FarFormat

FINITE = [code for code in range(256) if code & 127 != 127]


def e4m3(code: int) -> float:
    """Value of a code, from the definition."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


def key_at(token: int, channel: int, dim: int) -> int:
    """Byte of a key code within its codes, from docs/formats.md."""
    line = (token >> 4) * (dim // 4) + (channel >> 2)
    lane = (token >> 2 & 3) * 16 + (channel >> 1 & 1) * 8
    return line * 64 + lane + (token & 3) * 2 + (channel & 1)


def encode(key: Tensor, value: Tensor | None = None) -> Tensor:
    """Record of one tile of one head, from ``[64, dim]``."""
    value = torch.zeros(64, 32) if value is None else value
    return torch_kvq.quantize_far(key[None, None], value[None, None])[0, 0]


def test_sizes() -> None:
    for dims in ((64, 64), (128, 128), (80, 96), (512, 32)):
        layout = FarFormat(*dims)
        assert layout.record_bytes == 64 * (dims[0] + dims[1] // 2 + 6)
        starts = (layout.key_code_offset, layout.value_scale_offset, layout.value_code_offset)
        assert all(offset % 64 == 0 for offset in (*starts, layout.record_bytes))
    for dim in (0, 24, 528):
        with pytest.raises(ValueError, match=f"key_dim must be .*got {dim}"):
            FarFormat(dim, 64)


@pytest.mark.parametrize(("dim", "least"), ((128, 1.95), (64, 1.9)))
def test_bytes_against_float16(dim: int, least: float) -> None:
    """A tenth of the tokens near beside their far copy, a fifth of that free, masks and indices."""
    near = 0.1 * 1.2 * (2 * 2 * dim + 4)
    total = FarFormat(dim, dim).bytes_per_token + near + 1 / 8
    assert 2 * 2 * dim / total >= least


def test_every_code_is_decoded(capability: str) -> None:
    """A token with all finite codes: the largest of them sets its scale to 1."""
    codes = torch.tensor((FINITE * 3)[:512], dtype=torch.uint8)
    key = torch.tensor([e4m3(int(code)) for code in codes]).expand(64, -1)
    record = encode(key)
    decoded, _ = torch_kvq.dequantize_far(record[None, None], 512, 32)
    assert_same(decoded[0, 0], key)
    start = FarFormat(512, 32).key_code_offset
    for token, channel in ((0, 0), (37, 22), (63, 511), (16, 3)):
        assert int(record[start + key_at(token, channel, 512)]) == int(codes[channel])


def test_rounding_goes_to_the_even_neighbour(capability: str) -> None:
    positive = sorted(e4m3(code) for code in FINITE if code < 128)
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(positive)])
    above, below = (torch.nextafter(middles, torch.tensor(x)) for x in (1e9, -1e9))
    x = torch.cat((middles, above, below, -middles, torch.tensor([448.0, -448.0, -0.0])))
    key = torch.nn.functional.pad(x, (0, 512 - len(x))).expand(64, -1)
    decoded, _ = torch_kvq.dequantize_far(encode(key)[None, None], 512, 32)
    n = len(middles)
    even = torch.tensor([positive[i + i % 2] for i in range(n)])
    got = decoded[0, 0, 5]
    assert_same(got[:n], even)
    assert_same(got[n : 2 * n], torch.tensor(positive[1:]))
    assert_same(got[2 * n : 3 * n], torch.tensor(positive[:-1]))
    assert_same(got[3 * n : 4 * n], -even)


@pytest.mark.parametrize("size", (1.0, 0.3, 7e4, 65504.0, 1e-3, 1e-5, 1e-8, 1e-30, 0.0, math.inf))
def test_no_code_is_nan_and_large_values_saturate(capability: str, size: float) -> None:
    key = torch.randn(64, 64, generator=Case("sizes").generator("key"))
    key[:, 3] = 5.0
    key[7, 4:6] = torch.tensor([torch.nan, -torch.inf])
    record = encode(key * size, key * size)
    codes = record[128 : 128 + 64 * 64] & 127
    assert int(codes.max()) < 127
    decoded = torch_kvq.dequantize_far(record[None, None], 64, 64)
    assert all(bool(x.isfinite().all()) for x in decoded)
    if 1e-3 <= size <= 1.0:
        others = torch.arange(64) != 7
        assert int(codes.max()) == 126
        error = (decoded[0][0, 0, others] - key[others] * size).abs()
        assert bool((error <= key[others].abs() * size * 2**-4 + 1e-2 * size).all())


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("dims", ((64, 64), (32, 512), (80, 48), (144, 128)), ids=str)
def test_records_are_those_of_the_reference(
    capability: str, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    for data in cases.DATA:
        case = Case(f"far-{data}", key_dim=dims[0], value_dim=dims[1], dtype=dtype, data=data,
                    steps=(320,))  # fmt: skip
        key, value = (
            x[0].unflatten(1, (5, 64)).transpose(0, 1).contiguous() for x in cases.make_tokens(case)
        )
        wanted = reference.quantize_far(key, value)
        assert_same(torch_kvq.quantize_far(key, value), wanted)
        for view in (spread, swapped, row_sliced):
            assert_same(torch_kvq.quantize_far(view(key), view(value)), wanted)
        for out in cases.DTYPES:
            for got, same in zip(
                torch_kvq.dequantize_far(wanted, *dims, out),
                reference.dequantize_far(wanted, *dims, out),
                strict=True,
            ):
                assert got.dtype == out
                assert_same(got, same)


def test_a_token_is_encoded_alone(capability: str) -> None:
    key, value = torch.randn(2, 1, 1, 64, 64)
    whole = torch_kvq.dequantize_far(torch_kvq.quantize_far(key, value), 64)
    key[..., :40, :], value[..., 50:, :] = 1e4, torch.nan
    part = torch_kvq.dequantize_far(torch_kvq.quantize_far(key, value), 64)
    assert_same(part[0][..., 40:, :], whole[0][..., 40:, :])
    assert_same(part[1][..., :50, :], whole[1][..., :50, :])


def test_values_are_within_half_a_step(capability: str) -> None:
    key, value = torch.randn(2, 3, 2, 64, 96)
    value = value * 10 + 100
    _, decoded = torch_kvq.dequantize_far(torch_kvq.quantize_far(key, value), 96)
    step = (value.amax(-1) - value.amin(-1)) / 15
    assert bool(((decoded - value).abs().amax(-1) <= step * 0.51 + 0.1).all())


def test_frozen_record(capability: str) -> None:
    i = torch.arange(64 * 64)
    key = ((i * 37 % 251 - 125) / 16).view(64, 64)
    value = ((i * 101 % 239 - 100) / 32).view(64, 64)
    digest = hashlib.sha256(encode(key, value).numpy().tobytes()).hexdigest()
    assert digest[:16] == "1fe0d14876b56896"


@pytest.mark.parametrize(("dim", "std"), ((64, 1.5), (128, 1.5), (128, 0.5), (128, 3.0)))
def test_cosine_of_the_output(capability: str, dim: int, std: float) -> None:
    """With the tenth of the tokens near that has the greatest weight, as a cache chooses them."""
    case = Case("cosine", key_dim=dim, value_dim=dim, heads=4, kv_heads=4, steps=(2048,),
                logit_std=std)  # fmt: skip
    query, (key, value) = cases.make_query(case), cases.make_tokens(case)
    state, _ = tiers.make_tiers(case, "fp8-int4")
    tiers.choose_near(case, state, query)
    out = torch_kvq.tiered_attention(query, *state)[0]
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert float(torch.cosine_similarity(out, exact, -1).min()) >= 0.995
    assert head_error(out, exact) < 0.1
