"""The formats of docs/formats.md, literally: sizes, rotation, packing, and frozen records."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch import Tensor

import torch_kvq
from torch_kvq import formats, reference
from torch_kvq.formats import TileFormat, quantized_tokens
from torch_kvq.reference import hadamard, packing

DIMS = tuple(range(32, 513, 16))
QUANTIZED = [(k, v) for k in (2, 3, 4) for v in (2, 3, 4)]


def test_a_token_at_4_bits_costs_135_bytes() -> None:
    layout = TileFormat(128, 128, 4, 4)
    assert (layout.record_bytes, layout.bytes_per_token) == (8640, 135.0)
    assert layout.bytes_per_token <= 136


@pytest.mark.parametrize(
    ("arguments", "size"),
    [
        ((64, 64, 4, 4), 128 + 2048 + 128 + 2048 + 128),
        ((64, 64, 3, 3), 128 + 1536 + 128 + 1536 + 128),
        ((64, 64, 2, 2), 128 + 1024 + 128 + 1024 + 128),
        ((128, 64, 4, 2), 128 + 4096 + 128 + 1024 + 192),
        ((80, 96, 4, 3), 128 + 2560 + 128 + 2304 + 128),
        ((64, 96, 16, 16), 2 * 64 * (64 + 96)),
        ((64, 96, 16, 16, 4), 4 * 64 * (64 + 96)),
    ],
)
def test_record_sizes(arguments: tuple[int, ...], size: int) -> None:
    assert TileFormat(*arguments).record_bytes == size


@pytest.mark.parametrize("bits", QUANTIZED, ids=str)
@pytest.mark.parametrize("dims", ((64, 64), (80, 512), (144, 48)), ids=str)
def test_parts_follow_each_other(dims: tuple[int, int], bits: tuple[int, int]) -> None:
    layout = TileFormat(*dims, *bits)
    assert layout.key_scale_offset == 0
    assert layout.key_code_offset == 128
    assert layout.key_code_bytes == 8 * dims[0] * bits[0]
    assert layout.value_scale_offset == 128 + layout.key_code_bytes
    assert layout.value_code_offset == layout.value_scale_offset + 128
    assert layout.value_code_bytes == 8 * dims[1] * bits[1]
    assert layout.mean_offset == layout.value_code_offset + layout.value_code_bytes
    assert layout.mean_scale_offset == layout.mean_offset + dims[0]
    assert layout.record_bytes == math.ceil((layout.mean_scale_offset + 2) / 64) * 64
    starts = (layout.key_code_offset, layout.value_scale_offset, layout.value_code_offset)
    assert all(offset % 64 == 0 for offset in (*starts, layout.mean_offset))


@pytest.mark.parametrize("dim", (0, 16, 31, 40, 100, 528, 1024, -64))
def test_other_dims_are_refused(dim: int) -> None:
    for dims in ((dim, 64), (64, dim)):
        with pytest.raises(ValueError, match=f"_dim must be .*got {dim}"):
            TileFormat(*dims, 4, 4)


@pytest.mark.parametrize("bits", ((1, 4), (5, 4), (4, 8), (16, 4), (4, 16), (0, 0)), ids=str)
def test_other_bits_are_refused(bits: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"key_bits={bits[0]}, value_bits={bits[1]}"):
        TileFormat(64, 64, *bits)


@pytest.mark.parametrize("dim", DIMS)
def test_the_transform_is_orthogonal(dim: int) -> None:
    matrix = hadamard.transform(torch.eye(dim))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim), rtol=0, atol=4e-6)
    torch.testing.assert_close(hadamard.transform(matrix, inverse=True), torch.eye(dim))
    entries = matrix[matrix.abs() > 1e-3].abs()
    torch.testing.assert_close(entries, torch.full_like(entries, float(entries[0])))
    odd = dim // (dim & -dim)
    assert len(entries) == dim * (dim if odd in (1, 3, 5, 7) else dim & -dim)


@pytest.mark.parametrize("order", (12, 20, 28))
def test_paley_matrices(order: int) -> None:
    matrix = torch.tensor(hadamard.paley(order))
    assert bool((matrix.abs() == 1).all())
    assert torch.equal(matrix @ matrix.T, order * torch.eye(order))


def test_paley_matrices_by_their_rows() -> None:
    """Row 1 of order 12 is chi modulo 11, of order 28 the second row of the first block."""
    assert hadamard.paley(12)[0] == (1.0,) * 12
    assert hadamard.paley(12)[1] == (-1, 1, 1, -1, 1, 1, 1, -1, -1, -1, 1, -1)
    assert hadamard.paley(28)[0][:6] == (1, -1, 1, 1, 1, 1)
    assert hadamard.paley(28)[1][:6] == (-1, -1, 1, -1, 1, -1)
    assert hadamard.paley(28)[2][:8] == (1, 1, 1, -1, 1, 1, -1, -1)


def test_rotation_of_a_unit_vector() -> None:
    first = hadamard.transform(torch.eye(64))
    assert torch.equal(first[0], torch.full((64,), 0.125))
    assert torch.equal(first[1], torch.tensor([0.125, -0.125]).repeat(32))
    assert torch.equal(first[32], torch.tensor([0.125, -0.125]).repeat_interleave(32))


def sign_bytes(kind: str, dim: int) -> bytes:
    signs = formats.signs(kind, dim)  # type: ignore[arg-type]
    assert signs.dtype == torch.float32 and bool((signs.abs() == 1).all())
    bits = [int(sign < 0) for sign in signs.tolist()]
    return bytes(sum(bits[8 * i + j] << j for j in range(8)) for i in range(dim // 8))


def test_signs_are_fixed() -> None:
    assert sign_bytes("key", 512)[:16].hex() == "a87a8ff85b6bd74c08aa04bab0c8c567"
    assert sign_bytes("value", 512)[:16].hex() == "9ccbde9489480941318ffa1fb7af104d"
    for kind in ("key", "value"):
        assert all(sign_bytes(kind, 512).startswith(sign_bytes(kind, dim)) for dim in DIMS)


def test_codebooks() -> None:
    assert {bits: len(levels) for bits, levels in formats.LEVELS.items()} == {4: 16, 3: 8, 2: 4}
    for levels in formats.LEVELS.values():
        assert list(levels) == sorted(-level for level in levels)
        assert max(levels) <= 63 and 2 * 126 * 64 < 2**15


def random_codes(dim: int, bits: int) -> Tensor:
    generator = torch.Generator().manual_seed(dim + bits)
    return torch.randint(0, 2**bits, (64, dim), generator=generator, dtype=torch.uint8)


def code_bits(unit: int, lane: int, element: int, bits: int) -> list[int]:
    """Positions of the bits of a code in the packed string, the lowest first."""
    byte = lane * 4 + element
    if bits == 4:
        return [8 * (unit // 2 * 64 + byte) + 4 * (unit % 2) + i for i in range(4)]
    if bits == 2:
        return [8 * (unit // 4 * 64 + byte) + 2 * (unit % 4) + i for i in range(2)]
    group, u = 192 * (unit // 8), unit % 8
    low = [8 * (group + 64 * (u >> 2) + byte) + 2 * (u & 3) + i for i in range(2)]
    return [*low, 8 * (group + 128 + byte) + u]


@pytest.mark.parametrize("dim", (48, 64, 96, 128))
@pytest.mark.parametrize("bits", (4, 3, 2))
@pytest.mark.parametrize("kind", ("key", "value"))
def test_packing_by_its_definition(kind: packing.Kind, bits: int, dim: int) -> None:
    codes = random_codes(dim, bits)
    packed = packing.pack(codes, kind, bits)
    assert packed.shape == (8 * dim * bits,)
    stream = (packed[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten().tolist()
    used = set()
    for token in range(64):
        for channel in range(dim):
            if kind == "key":
                lane, element = token & 15, channel & 3
                unit = (token >> 4) * (dim // 4) + (channel >> 2)
            else:
                lane, element = channel & 15, token & 3
                unit = (channel >> 4) * 16 + (token >> 2)
            places = code_bits(unit, lane, element, bits)
            used.update(places)
            assert sum(stream[p] << i for i, p in enumerate(places)) == codes[token, channel]
    assert len(used) == len(stream)
    assert torch.equal(packing.unpack(packed, kind, bits), codes)


def encoded(dim: int, bits: int) -> tuple[Tensor, TileFormat, tuple[Tensor, Tensor]]:
    """A record and its decoded keys and values, rotated back into levels times scale."""
    key, value = torch.randn(2, 1, 1, 64, dim, generator=torch.Generator().manual_seed(dim))
    balance = torch.ones(1, 1, dim)
    record = torch_kvq.quantize_tile(key, value, balance, bits, bits)
    layout = TileFormat(dim, dim, bits, bits)
    decoded_key, decoded_value = torch_kvq.dequantize_tile(record, balance, bits, bits)
    mean = record[..., layout.mean_offset : layout.mean_scale_offset].view(torch.int8).float()
    scale = record[..., layout.mean_scale_offset : layout.mean_scale_offset + 2].clone()
    centred = decoded_key - (mean * scale.view(torch.float16).float()).unsqueeze(2)
    rotated = (
        torch_kvq.fwht(centred, formats.signs("key", dim)),
        torch_kvq.fwht(decoded_value, formats.signs("value", dim)),
    )
    return record[0, 0], layout, (rotated[0][0, 0], rotated[1][0, 0])


@pytest.mark.parametrize("dim", (64, 128))
def test_nibbles_of_a_4_bit_record(dim: int) -> None:
    """Each nibble by the formula of its byte, against the decoded record."""
    record, layout, (keys, values) = encoded(dim, 4)
    levels = formats.LEVELS[4]
    scales = [
        record[offset : offset + 128].clone().view(torch.float16).tolist()
        for offset in (layout.key_scale_offset, layout.value_scale_offset)
    ]
    for tok in range(64):
        for d in range(dim):
            at = (tok >> 4) * 8 * dim + (d >> 3) * 64 + (tok & 15) * 4 + (d & 3)
            byte = int(record[layout.key_code_offset + at])
            code = byte >> 4 if d & 4 else byte & 15
            assert abs(scales[0][tok] * levels[code] - float(keys[tok, d])) < 1e-4
            at = (d >> 4) * 512 + (tok >> 3) * 64 + (d & 15) * 4 + (tok & 3)
            byte = int(record[layout.value_code_offset + at])
            code = byte >> 4 if tok & 4 else byte & 15
            assert abs(scales[1][tok] * levels[code] - float(values[tok, d])) < 1e-4


@pytest.mark.parametrize("bits", (4, 3, 2))
def test_codes_are_the_nearest_levels_of_some_scale(bits: int) -> None:
    key, value = torch.randn(2, 1, 1, 64, 64, generator=torch.Generator().manual_seed(bits))
    ones = torch.ones(1, 1, 64)
    record = torch_kvq.quantize_tile(key, value, ones, bits, bits)
    parts = reference.decode.read_record(record, TileFormat(64, 64, bits, bits))
    z = torch_kvq.fwht(value, formats.signs("value", 64))[0, 0]
    levels = torch.tensor(formats.LEVELS[bits], dtype=torch.float32)
    rms = z.square().mean(-1, keepdim=True).sqrt()
    codes = parts.value_codes[0, 0].long()
    candidates = torch.stack([
        (z / (rms * g) * formats.LEVELS_PER_SIGMA[bits]).unsqueeze(-1).sub(levels).abs().argmin(-1)
        for g in formats.SCALE_CANDIDATES
    ])  # fmt: skip
    gain = (z * levels[candidates]).sum(-1).square() / levels[candidates].square().sum(-1)
    best = candidates[gain.argmax(0), torch.arange(64)]
    assert float((best == codes).float().mean()) > 0.999
    c = levels[codes]
    scale = (z * c).sum(-1) / c.square().sum(-1)
    torch.testing.assert_close(parts.value_scale[0, 0].float(), scale, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    ("tokens", "quantized", "expected"),
    [
        (0, 0, 0),
        (256, 0, 0),
        (257, 0, 128),
        (259, 0, 128),
        (260, 0, 192),
        (323, 0, 192),
        (324, 0, 256),
        (324, 192, 256),
        (200, 192, 192),
        (195, 100, 100),
        (196, 100, 128),
        (260, 100, 192),
        (10, 6, 6),
    ],
)
def test_when_tokens_become_tiles(tokens: int, quantized: int, expected: int) -> None:
    rule = {"sink_tokens": 4, "residual_length": 64, "quantized_start": 256}
    assert quantized_tokens(tokens, quantized, **rule) == expected


def test_recent_tokens_stay_exact() -> None:
    rule = {"sink_tokens": 4, "residual_length": 64, "quantized_start": 256}
    quantized = 0
    for tokens in range(1200):
        quantized = quantized_tokens(tokens, quantized, **rule)
        assert quantized % 64 == 0
        if tokens > 256:
            assert 64 <= tokens - 4 - quantized <= 127
    assert quantized_tokens(5, 0, sink_tokens=9, residual_length=0, quantized_start=0) == 0


@pytest.mark.parametrize("sink_tokens", (0, 4, 100))
@pytest.mark.parametrize("residual_length", (0, 64))
@pytest.mark.parametrize("quantized_start", (0, 64, 150, 256, 4096))
def test_the_keys_of_the_balance_are_there(
    sink_tokens: int, residual_length: int, quantized_start: int
) -> None:
    """The shortest row with a tile has enough keys behind its sinks."""
    rule = {"sink_tokens": sink_tokens, "residual_length": residual_length}
    first = next(
        n for n in range(9000) if quantized_tokens(n, 0, quantized_start=quantized_start, **rule)
    )
    used = formats.balance_tokens(sink_tokens, quantized_start)
    assert 64 <= used <= min(first - sink_tokens, formats.BALANCE_TOKENS)
    assert formats.balance_tokens(4, 256) == formats.BALANCE_TOKENS == 192


def formula(dim: int, factor: int, tokens: int = 64) -> Tensor:
    """Multiples of 1/64 within ±8 from a congruence, float32 ``[1, 2, tokens, dim]``."""
    index = torch.arange(2 * tokens * dim, dtype=torch.int64)
    values = (index * factor + index * index % 1009 * 7919 + 12345) % 1025 - 512
    return (values.float() / 64).view(1, 2, tokens, dim)


def digest(x: Tensor) -> str:
    return hashlib.sha256(bytes(x.contiguous().view(torch.uint8).flatten().tolist())).hexdigest()[
        :32
    ]


RECORDS = {
    (4, 4, 128, 128): "293f03dc3d758aec246fb7dc9f6ab89b",
    (3, 3, 64, 64): "43484b862a022058776517ba70f71a29",
    (2, 2, 96, 80): "2a2fee4e1a3980de895b4fc956b46cc9",
    (4, 3, 144, 48): "e613463f2466437cac0b7b74435ee396",
    (16, 16, 64, 32): "6b74b3a54b38e8fa6948df83e64d1feb",
}
"""SHA-256 of records of format version 1; what decodes otherwise is another version."""

BALANCE = "8247df141b53849d9315a4b8d22a1c78"


@pytest.mark.parametrize("arguments", RECORDS, ids=str)
def test_records_are_frozen(arguments: tuple[int, int, int, int]) -> None:
    key_bits, value_bits, key_dim, value_dim = arguments
    key, value = formula(key_dim, 48271) + 3, formula(value_dim, 69621)
    balance = torch_kvq.key_balance(key)
    record = torch_kvq.quantize_tile(key, value, balance, key_bits, value_bits)
    assert formats.FORMAT_VERSION == 1
    assert digest(record) == RECORDS[arguments]


X_RECORDS = {
    (2, "token"): "3636bbe2d6ceeee4f99b7dd1d4b14fce",
    (3, "channel"): "35bf56a78e1fd664550cf67261739f52",
    (4, "token"): "e558b53fd233f40340c0ca7a34f97ff7",
    (4, "channel"): "2de40808e93480eb2e300ad9be6c5e6b",
    (8, "token"): "cf91835242032a53101cc94bec020b88",
    (8, "channel"): "87734e061e4b6f47fb8c289425949a12",
}


@pytest.mark.parametrize(("bits", "axis"), X_RECORDS, ids=str)
def test_x_records_are_frozen(bits: int, axis: str) -> None:
    x = formula(128, 48271, 128)[0] + torch.arange(128) / 16
    assert digest(torch_kvq.quantize_x(x, bits, axis)) == X_RECORDS[bits, axis]


def test_the_balance_is_frozen() -> None:
    assert digest(torch_kvq.key_balance(formula(96, 48271, 300))) == BALANCE
