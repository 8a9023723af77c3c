"""Records of layer inputs: their layout, their error, and kernels that agree to the last bit."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import torch_kvq
from tests.cases import DTYPES
from tests.ops.compare import assert_same
from tests.ops.test_robustness import row_sliced, spread, swapped
from torch_kvq import formats, reference
from torch_kvq._x_formats import X_AXES, X_BITS, XFormat
from torch_kvq.reference import hadamard

PACKED = (2, 3, 4, 8)
DATA = ("normal", "large", "tiny", "zeros", "broken", "means", "outlier")
ERROR = {2: 0.35, 3: 0.19, 4: 0.1, 8: 0.007}
"""Relative L2 error of normal inputs."""


@functools.cache
def sample(channels: int, data: str = "normal", tokens: int = 128) -> Tensor:
    """Inputs of two rows, float32."""
    generator = torch.Generator().manual_seed(channels)
    x = torch.randn(2, tokens, channels, generator=generator)
    if data == "large":
        return x * 3e4
    if data == "tiny":
        return x * 1e-7
    if data == "zeros":
        return x * 0
    if data == "broken":
        x[0, 3, 5], x[1, 2, 7], x[1, 100, 0] = torch.nan, torch.inf, -torch.inf
    if data == "means":
        return x + 20 * torch.randn(channels, generator=generator)
    if data == "outlier":
        x[..., 0] *= 50
    return x


@pytest.mark.parametrize("axis", X_AXES)
@pytest.mark.parametrize("bits", X_BITS)
@pytest.mark.parametrize("channels", (64, 576))
def test_sizes(channels: int, bits: int, axis: str) -> None:
    layout = XFormat(channels, bits, axis, 4)
    if bits == 16:
        assert layout.record_bytes == 64 * channels * 4
        return
    metadata = 2 if axis == "token" else 3 + 2 / 64
    assert layout.record_bytes == 8 * channels * bits + metadata * channels
    assert torch_kvq.quantize_x(sample(channels), bits, axis).shape[2] == layout.record_bytes


def test_bytes_against_float16_keys_and_values() -> None:
    """4 bytes for each channel of keys and values; 30 layers, three of which have 4 bits."""
    token = {bits: XFormat(4096, bits).bytes_per_token / 4096 for bits in (2, 3, 4)}
    channel = {bits: XFormat(1024, bits, "channel").bytes_per_token / 1024 for bits in (2, 3, 4)}
    assert 4 / token[4] >= 7.4
    for bits, least in ((3, 9), (2, 12)):
        assert 4 * 30 / (4 * token[4] + 27 * token[bits]) >= least
    for bits, least in ((4, 3.7), (3, 4.8), (2, 6.9)):
        assert 4 / (token[bits] + channel[bits]) >= least


@pytest.mark.parametrize("bits", PACKED)
def test_codes_by_their_definition(bits: int) -> None:
    """A token of two groups, every code of which is read from its bits."""
    record = torch_kvq.quantize_x(sample(128), bits, rotate=False)[0, 0]
    decoded = torch_kvq.dequantize_x(record[None, None], 128, bits, rotate=False)[0]
    token, channel = 5, 64 + torch.arange(64)
    scale = record[2 * (2 * token + 1) :][:2].clone().view(torch.float16).float()
    group = record[256 + (2 * token + 1) * 8 * bits :][: 8 * bits].int()
    for i in range(64):
        if bits == 8:
            level = int(group[i]) - 256 * (int(group[i]) > 127)
        elif bits == 4:
            level = formats.LEVELS[4][int(group[i % 32]) >> 4 * (i // 32) & 15]
        else:
            code = int(group[i % 16]) >> 2 * (i // 16) & 3
            if bits == 3:
                code += 4 * (int(group[16 + i // 8]) >> i % 8 & 1)
            level = formats.LEVELS[bits][code]
        assert float(decoded[token, channel[i]]) == float(level * scale)


def test_means_by_their_definition() -> None:
    x = sample(128, "means")
    record = torch_kvq.quantize_x(x, 4, "channel", rotate=False)[1, 1]
    scale = record[384:388].clone().view(torch.float16).float().repeat_interleave(64)
    mean = record[256:384].view(torch.int8).float() * scale
    assert float((mean - x[1, 64:].mean(0)).abs().max()) <= float(scale.max()) / 2 * 1.01


@pytest.mark.parametrize("rotate", (True, False))
@pytest.mark.parametrize("axis", X_AXES)
@pytest.mark.parametrize("bits", PACKED)
def test_error(capability: str, bits: int, axis: str, rotate: bool) -> None:
    x = sample(192)
    decoded = torch_kvq.dequantize_x(
        torch_kvq.quantize_x(x, bits, axis, rotate), 192, bits, axis, rotate
    )
    assert float((decoded - x).norm() / x.norm()) <= ERROR[bits]


def test_rotation_spreads_outliers_and_means_take_offsets() -> None:
    def error(x: Tensor, axis: str, rotate: bool) -> float:
        record = torch_kvq.quantize_x(x, 3, axis, rotate)
        decoded = torch_kvq.dequantize_x(record, x.shape[2], 3, axis, rotate)
        return float((decoded - x).norm() / (x - x.mean(1, keepdim=True)).norm())

    rest = sample(192, "outlier")[..., 1:64]
    assert error(sample(192, "outlier"), "token", True) < 0.25
    assert float(rest.std()) < 1.1
    assert error(sample(192, "means"), "channel", False) < ERROR[3]
    assert error(sample(192, "means"), "token", False) > 4 * ERROR[3]


@pytest.mark.parametrize("axis", X_AXES)
def test_rotated_records_decode_to_rotated_channels(capability: str, axis: str) -> None:
    x = sample(128)
    rotated = hadamard.transform(x.unflatten(-1, (2, 64))).flatten(-2)
    record = torch_kvq.quantize_x(x, 4, axis)
    assert_same(record, torch_kvq.quantize_x(rotated, 4, axis, rotate=False))
    plain = torch_kvq.dequantize_x(record, 128, 4, axis, rotate=False)
    back = hadamard.transform(plain.unflatten(-1, (2, 64)), inverse=True).flatten(-2)
    assert_same(torch_kvq.dequantize_x(record, 128, 4, axis), back)


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("rotate", (True, False))
@pytest.mark.parametrize("axis", X_AXES)
@pytest.mark.parametrize("bits", X_BITS)
@pytest.mark.parametrize("channels", (64, 192, 576))
def test_kernels_are_bit_equal(
    tier: str, channels: int, bits: int, axis: str, rotate: bool, data: str
) -> None:
    for dtype in DTYPES:
        x = sample(channels, data).to(dtype)
        records = reference.quantize_x(x, bits, axis, rotate)
        assert_same(torch_kvq.quantize_x(x, bits, axis, rotate), records)
        for out in (dtype,) if bits == 16 else DTYPES:
            decoded = torch_kvq.dequantize_x(records, channels, bits, axis, rotate, out)
            expected = reference.dequantize_x(records, channels, bits, axis, rotate, out)
            assert decoded.dtype == out
            assert_same(decoded, expected)


@pytest.mark.parametrize("axis", X_AXES)
@pytest.mark.parametrize("bits", X_BITS)
def test_pass_through_is_exact_and_other_codes_are_finite(
    capability: str, bits: int, axis: str
) -> None:
    x = sample(64, "broken")
    decoded = torch_kvq.dequantize_x(torch_kvq.quantize_x(x, bits, axis), 64, bits, axis)
    if bits == 16:
        assert_same(decoded, x)
    else:
        assert bool(decoded.isfinite().all())


@pytest.mark.parametrize("bits", X_BITS)
@pytest.mark.parametrize("tokens", (0, 1, 63, 64, 65, 200))
def test_a_token_is_encoded_alone(capability: str, tokens: int, bits: int) -> None:
    x = sample(64, tokens=200)
    whole = torch_kvq.dequantize_x(torch_kvq.quantize_x(x, bits), 64, bits)
    records = torch_kvq.quantize_x(x[:, :tokens], bits)
    assert records.shape[1] == -(-tokens // 64)
    decoded = torch_kvq.dequantize_x(records, 64, bits)
    assert_same(decoded[:, :tokens], whole[:, :tokens])
    assert_same(decoded[:, tokens:], torch.zeros_like(decoded[:, tokens:]))


@pytest.mark.parametrize("view", (spread, swapped, row_sliced))
@pytest.mark.parametrize("axis", X_AXES)
@pytest.mark.parametrize("bits", (3, 16))
def test_strides(capability: str, bits: int, axis: str, view: object) -> None:
    x = sample(64)
    records = torch_kvq.quantize_x(x, bits, axis)
    assert_same(torch_kvq.quantize_x(view(x), bits, axis), records)  # type: ignore[operator]
    decoded = torch_kvq.dequantize_x(view(records), 64, bits, axis)  # type: ignore[operator]
    assert_same(decoded, torch_kvq.dequantize_x(records, 64, bits, axis))


@pytest.mark.parametrize("axis", X_AXES)
@pytest.mark.parametrize("bits", X_BITS)
def test_opcheck(bits: int, axis: str) -> None:
    x = sample(64).bfloat16()
    check = torch.library.opcheck
    check(torch.ops.kvq.quantize_x.default, (x, bits, axis))
    records = torch_kvq.quantize_x(x, bits, axis)
    check(torch.ops.kvq.dequantize_x.default, (records, 64, bits, axis, True, torch.bfloat16))


@pytest.mark.parametrize("data", ("normal", "large", "means"))
@pytest.mark.parametrize("out_bits", PACKED)
@pytest.mark.parametrize("axis", X_AXES)
def test_sums(capability: str, axis: str, out_bits: int, data: str) -> None:
    """The kernel is bit-equal, and the sum is encoded once, in the rotated channels."""
    bits = (4, 3, 8)
    x = [sample(192, data) / (4**n) for n in range(3)]
    records = [torch_kvq.quantize_x(part, b, axis) for part, b in zip(x, bits, strict=True)]
    for count in (1, 2, 3):
        total = torch_kvq.sum_x(records[:count], 192, bits[:count], out_bits, axis)
        assert_same(total, reference.sum_x(records[:count], 192, bits[:count], out_bits, axis))
        views = [spread(part) for part in records[:count]]
        assert_same(torch_kvq.sum_x(views, 192, bits[:count], out_bits, axis), total)
    wanted = sum(
        torch_kvq.dequantize_x(part, 192, b, axis) for part, b in zip(records, bits, strict=True)
    )
    if data == "normal":
        decoded = torch_kvq.dequantize_x(total, 192, out_bits, axis)
        assert float((decoded - wanted).norm() / wanted.norm()) <= ERROR[out_bits]


@pytest.mark.parametrize("axis", X_AXES)
def test_opcheck_of_sums(axis: str) -> None:
    records = [torch_kvq.quantize_x(sample(64), bits, axis) for bits in (4, 3)]
    torch.library.opcheck(torch.ops.kvq.sum_x.default, (records, 64, [4, 3], 8, axis))


def add(**changes: object) -> Tensor:
    records = reference.quantize_x(sample(64), 4)
    given = {"records": [records] * 2, "channels": 64, "bits": [4, 4], "out_bits": 4}
    return torch.ops.kvq.sum_x(**given | changes)


BAD_SUMS = [
    ({"records": []}, "records must hold a tensor for each of bits, got 0 tensors"),
    ({"bits": [4]}, "records must hold a tensor for each of bits, got 2 tensors"),
    ({"bits": [4, 3]}, r"records\[1\].shape\[2\] must be 1664"),
    ({"bits": [4, 5]}, "bits must be 2, 3, 4, 8 or 16, got 5"),
    ({"out_bits": 16}, "out_bits must be 2, 3, 4 or 8 in a sum of records, got 16"),
    (
        {"records": [torch.zeros(1, 1, 2**14).byte()], "bits": [16]},
        "bits must be 2, 3, 4 or 8 in a sum of records, got 16",
    ),
    ({"axis": "row"}, "axis must be 'token' or 'channel', got 'row'"),
    ({"channels": 65}, "channels must be a positive multiple of 64, got 65"),
]


@pytest.mark.parametrize("is_compiled", (True, False))
@pytest.mark.parametrize(("changes", "message"), BAD_SUMS)
def test_bad_sums(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], message: str, is_compiled: bool
) -> None:
    if not is_compiled:
        monkeypatch.setattr(torch.ops.kvq, "sum_x", reference.sum_x)
    with pytest.raises(ValueError, match=message):
        add(**changes)


def quantize(**changes: object) -> Tensor:
    return torch.ops.kvq.quantize_x(**{"x": sample(64), "bits": 4} | changes)


def dequantize(**changes: object) -> Tensor:
    records = reference.quantize_x(sample(64), 4)
    return torch.ops.kvq.dequantize_x(**{"records": records, "channels": 64, "bits": 4} | changes)


BAD = [
    (quantize, {"x": torch.zeros(64, 64)}, r"x must have 3 dimensions, got shape \(64, 64\)"),
    (quantize, {"x": torch.zeros(1, 64, 64).double()}, "x must be float32.*got torch.float64"),
    (quantize, {"x": torch.zeros(1, 64, 96)}, "channels must be a positive multiple of 64, got 96"),
    (quantize, {"x": torch.zeros(1, 64, 0)}, "channels must be a positive multiple of 64, got 0"),
    (quantize, {"bits": 5}, "bits must be 2, 3, 4, 8 or 16, got 5"),
    (quantize, {"axis": "row"}, "axis must be 'token' or 'channel', got 'row'"),
    (
        quantize,
        {"x": torch.zeros(1, 65, 64), "axis": "channel"},
        r"x.shape\[1\] must be a multiple of 64 .*got shape \(1, 65, 64\)",
    ),
    (dequantize, {"channels": 128}, r"records.shape\[2\] must be 4352"),
    (dequantize, {"bits": 3}, r"records.shape\[2\] must be 1664"),
    (dequantize, {"axis": "channel"}, r"records.shape\[2\] must be 2242"),
    (dequantize, {"bits": 0}, "bits must be 2, 3, 4, 8 or 16, got 0"),
    (dequantize, {"dtype": torch.float64}, "dtype must be float32.*got torch.float64"),
    (dequantize, {"records": torch.zeros(2, 2176).byte()}, "records must have 3 dimensions"),
    (dequantize, {"records": torch.zeros(1, 2, 2176).char()}, "records must be torch.uint8"),
]


@pytest.mark.parametrize("implementation", ("kernel", "reference", "fake"))
@pytest.mark.parametrize(("call", "changes", "message"), BAD)
def test_bad_input(
    monkeypatch: pytest.MonkeyPatch,
    implementation: str,
    call: object,
    changes: dict[str, object],
    message: str,
) -> None:
    if implementation == "reference":
        monkeypatch.setattr(torch.ops.kvq, "quantize_x", reference.quantize_x)
        monkeypatch.setattr(torch.ops.kvq, "dequantize_x", reference.dequantize_x)
    if implementation == "fake":
        place = {
            name: value.to("meta") if isinstance(value, Tensor) else value
            for name, value in changes.items()
        }
        name = "x" if call is quantize else "records"
        first = sample(64) if call is quantize else reference.quantize_x(sample(64), 4)
        changes = {name: first.to("meta")} | place
    with pytest.raises(ValueError, match=message):
        call(**changes)  # type: ignore[operator]
