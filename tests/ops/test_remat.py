"""Keys and values from cached inputs, and attention to them, against float64."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import torch_kvq
from tests.ops.compare import assert_same, head_error
from torch_kvq import reference
from torch_kvq._x_formats import XFormat
from torch_kvq.reference import remat
from torch_kvq.reference.lut_attention import allowed_keys

ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Relative error of the worst head by the dtype of weights, inputs and queries."""


@dataclass(frozen=True)
class Case:
    """A layer and a call; lengths are rows of start, length, quantized."""

    id: str
    lengths: tuple[tuple[int, int, int], ...] = ((0, 700, 640), (30, 700, 576))
    channels: int = 128
    value_channels: int | None = None
    bits: tuple[int, ...] = (4,)
    axis: str = "token"
    value_axis: str = "token"
    rotate: bool = True
    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 32
    value_dim: int = 48
    dtype: torch.dtype = torch.float32
    bias: bool = False
    norm: bool = False
    rotary: int = 0
    own_positions: bool = False
    queries: int = 3
    mask: str | None = None
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return self.id


CASES = (
    Case("plain"),
    Case("causal", options={"is_causal": True}),
    Case("rotary", rotary=32, norm=True, bias=True, options={"is_causal": True}),
    Case("rotary-partial", rotary=8, bias=True, own_positions=True),
    Case("bias", bias=True, sinks=True, options={"is_causal": True, "softcap": 5.0}),
    Case("mqa", kv_heads=1, heads=6, bias=True, rotary=16),
    Case("mha", kv_heads=4, queries=1, rotary=32),
    Case("sum", bits=(4, 3), rotary=32),
    Case("sum-plain", bits=(4, 2), bias=True),
    Case("latent", channels=64, value_channels=128, axis="channel", rotary=32, bias=True),
    Case("latent-plain", channels=128, value_channels=64, axis="channel", rotate=False),
    Case("bits2", bits=(2,), queries=70, options={"is_causal": True}),
    Case("bits8", bits=(8,), value_axis="channel", value_channels=64, rotary=32),
    Case("bits16", bits=(16,), rotary=32),
    Case("bits16-half", bits=(16,), dtype=torch.bfloat16, bias=True),
    Case("bits16-float16", bits=(16,), dtype=torch.float16, rotary=32),
    Case("sum-raw", bits=(16, 4), dtype=torch.bfloat16, bias=True),
    Case("float16", dtype=torch.float16, bias=True, rotary=32, norm=True),
    Case("bfloat16", dtype=torch.bfloat16, bias=True, rotary=32, norm=True),
    Case("bfloat16-plain", dtype=torch.bfloat16, bias=True),
    Case("window", rotary=32, options={"is_causal": True, "sliding_window": 40}),
    Case("window-long", bias=True, options={"is_causal": True, "sliding_window": 300}),
    Case("mask-bool", mask="bool", rotary=32, sinks=True),
    Case("mask-heads", mask="heads", bias=True),
    Case("mask-none-left", mask="empty", bias=True),
    Case("mask-none-left-sinks", mask="empty", rotary=32, sinks=True, bias=True),
    Case("exact-only", lengths=((0, 90, 0), (89, 90, 0)), bias=True, rotary=32),
    Case("records-only", lengths=((0, 640, 640),), options={"scale": 0.3}),
    Case("padding-only", lengths=((5, 5, 0), (0, 5, 0)), bias=True, queries=2),
    Case("nothing", lengths=((0, 0, 0),), queries=1),
    Case("partial-page", lengths=((0, 150, 100),), bias=True),
    Case("long", lengths=((0, 2100, 2048),), rotary=32, queries=1, norm=True),
)


@dataclass
class Call:
    """Arguments of `remat_attention` and the float64 inputs that are cached."""

    arguments: dict[str, Any]
    x: list[Tensor]
    value_x: list[Tensor]


def _cache(case: Case, channels: int, axis: str, generator: torch.Generator) -> tuple[Any, ...]:
    """Records and exact inputs of all rows, poisoned where nothing is, and the decoded inputs."""
    pages = max((-(-used // 64) for _, _, used in case.lengths), default=0) + 1
    capacity = max(max(n - start, 0) - used for start, n, used in case.lengths) + 2
    batch = len(case.lengths)
    records = [
        torch.full(
            (batch, pages, XFormat(channels, b, axis, case.dtype.itemsize).record_bytes),
            0xFF,
            dtype=torch.uint8,
        )
        for b in case.bits
    ]
    exact = torch.full((batch, capacity, channels), torch.nan).to(case.dtype)
    inputs = []
    for row, (start, length, used) in enumerate(case.lengths):
        held = max(length - start, 0) - used
        exact[row, :held] = torch.randn(held, channels, generator=generator).to(case.dtype)
        parts = [exact[row, :held].double()]
        whole = -(-used // 64)
        total = torch.zeros(used, channels, dtype=torch.float64)
        for part, bits in zip(records, case.bits, strict=True):
            x = torch.randn(1, 64 * whole, channels, generator=generator).to(case.dtype)
            part[row, :whole] = reference.quantize_x(x, bits, axis, case.rotate)[0]
            wide = case.dtype if bits == 16 else torch.float32
            decoded = reference.dequantize_x(
                part[row : row + 1, :whole], channels, bits, axis, case.rotate, wide
            )
            total += decoded[0, :used].double()
        inputs.append(torch.cat((total, *parts)))
    return records, exact, inputs


def _mask(case: Case, generator: torch.Generator) -> Tensor | None:
    batch, length = len(case.lengths), max(n for _, n, _ in case.lengths)
    keep = torch.rand(batch, 1, case.queries, length + 3, generator=generator) < 0.6
    if case.mask == "bool":
        return keep
    if case.mask == "heads":
        bias = torch.randn(1, case.heads, case.queries, length, generator=generator)
        return bias.masked_fill(~keep[:1, :, :, :length], -torch.inf)
    if case.mask == "empty":
        keep[0, :, 1] = False
        return keep
    return None


@functools.cache
def make_call(case: Case) -> Call:
    """State and weights of a case."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.id.encode()))

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    channels = case.channels
    records, exact, x = _cache(case, channels, case.axis, generator)
    value_records, value_exact, value_x = [], None, x
    if case.value_channels:
        value_records, value_exact, value_x = _cache(
            case, case.value_channels, case.value_axis, generator
        )
    value_channels = case.value_channels or channels
    tokens = max(max(n - start, 0) for start, n, _ in case.lengths) + 2
    rows = len(case.lengths) if case.own_positions else 1
    cos, sin = draw(2, rows, tokens, case.rotary) if case.rotary else (None, None)
    arguments = {
        "query": draw(len(case.lengths), case.heads, case.queries, case.key_dim).to(case.dtype),
        "records": records,
        "value_records": value_records,
        "exact": exact,
        "value_exact": value_exact,
        "lengths": torch.tensor(case.lengths, dtype=torch.int32),
        "key_weight": (draw(case.kv_heads * case.key_dim, channels) / channels**0.5),
        "value_weight": draw(case.kv_heads * case.value_dim, value_channels) / channels**0.5,
        "key_bias": draw(case.kv_heads * case.key_dim) if case.bias else None,
        "value_bias": draw(case.kv_heads * case.value_dim) if case.bias else None,
        "key_norm": 1 + 0.1 * draw(case.key_dim) if case.norm else None,
        "cos": cos,
        "sin": sin,
        "attn_mask": _mask(case, generator),
        "bits": list(case.bits),
        "value_bits": list(case.bits) if case.value_channels else [],
        "kv_heads": case.kv_heads,
        "axis": case.axis,
        "value_axis": case.value_axis,
        "rotate": case.rotate,
        "norm_eps": 1e-5,
        "sinks": draw(case.heads) if case.sinks else None,
        **case.options,
    }
    for name in ("key_weight", "value_weight", "key_bias", "value_bias"):
        if arguments[name] is not None:
            arguments[name] = arguments[name].to(case.dtype)
    return Call(arguments, x, value_x)


def naive_kv(call: Call, row: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a row by the definition, float64 ``[kv_heads, tokens, dim]``."""
    a = {k: v.double() if isinstance(v, Tensor) else v for k, v in call.arguments.items()}
    key = call.x[row] @ a["key_weight"].T
    value = call.value_x[row] @ a["value_weight"].T
    if a["key_bias"] is not None:
        key, value = key + a["key_bias"], value + a["value_bias"]
    key, value = (x.unflatten(-1, (a["kv_heads"], -1)).transpose(0, 1) for x in (key, value))
    if a["key_norm"] is not None:
        key = key / (key.square().mean(-1, keepdim=True) + 1e-5).sqrt() * a["key_norm"]
    if a["cos"] is not None:
        owner = row if len(a["cos"]) > 1 else 0
        cos, sin = (a[name][owner, : key.shape[1]] for name in ("cos", "sin"))
        n = cos.shape[1]
        turned = torch.cat((-key[..., n // 2 : n], key[..., : n // 2]), -1)
        key = torch.cat((key[..., :n] * cos + turned * sin, key[..., n:]), -1)
    return key, value


@functools.cache
def expected(case: Case) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp in float64."""
    call = make_call(case)
    a, outs, lses = call.arguments, [], []
    group = case.heads // case.kv_heads
    for row, (start, length, _) in enumerate(case.lengths):
        key, value = (x.repeat_interleave(group, 0) for x in naive_kv(call, row))
        score = a["query"][row].double() @ key.mT * case.options.get("scale", case.key_dim**-0.5)
        if "softcap" in case.options:
            score = 5.0 * torch.tanh(score / 5.0)
        position = torch.arange(key.shape[1]) + start
        query_position = torch.arange(case.queries) + length - case.queries
        allowed = allowed_keys(
            query_position,
            position,
            case.options.get("is_causal", False),
            case.options.get("sliding_window"),
        )
        if (mask := a["attn_mask"]) is not None:
            mask = mask[row if len(mask) > 1 else 0][..., position]
            allowed = allowed & (mask if mask.dtype == torch.bool else mask > -torch.inf)
            score = score + (0 if mask.dtype == torch.bool else mask)
        score = score.masked_fill(~allowed, -torch.inf)
        sink = torch.full((case.heads,), -torch.inf) if a["sinks"] is None else a["sinks"]
        extra = sink.double().view(-1, 1, 1).expand(-1, case.queries, 1)
        lse = torch.cat((score, extra), -1).logsumexp(-1)
        weights = (score - lse.unsqueeze(-1)).exp().masked_fill(score == -torch.inf, 0.0)
        outs.append(weights @ value)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("absorb_value", (None, False, True))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention(case: Case, absorb_value: bool | None) -> None:
    out, lse = expected(case)
    arguments = make_call(case).arguments
    absorbable = not case.rotary and not case.norm
    for absorb_key in (None, False, True) if absorbable else (None, False):
        got, got_lse = torch.ops.kvq.remat_attention(
            **arguments, absorb_key=absorb_key, absorb_value=absorb_value
        )
        assert got.dtype == case.dtype and got_lse.dtype == torch.float32
        assert head_error(got, out) <= ROUNDING[case.dtype]
        tolerance = 5 * ROUNDING[case.dtype]
        torch.testing.assert_close(got_lse.double(), lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", [c for c in CASES if c.lengths[0][2] >= 576], ids=str)
def test_keys_and_values(case: Case) -> None:
    call = make_call(case)
    names = ("records", "value_records", "key_weight", "value_weight", "key_bias", "value_bias",
             "key_norm", "cos", "sin", "bits", "value_bits", "kv_heads", "axis", "value_axis",
             "rotate", "norm_eps")  # fmt: skip
    arguments = {name: call.arguments[name] for name in names}
    pages = min(used for _, _, used in case.lengths) // 64
    for name in ("records", "value_records"):
        arguments[name] = [part[:, :pages] for part in arguments[name]]
    key, value = torch.ops.kvq.remat_kv(**arguments)
    assert key.dtype == value.dtype == case.dtype
    for row in range(len(case.lengths)):
        for got, wanted in zip((key[row], value[row]), naive_kv(call, row), strict=True):
            wanted = wanted[:, : 64 * pages]
            assert got.shape == wanted.shape
            assert head_error(got[None], wanted[None]) <= ROUNDING[case.dtype]


def test_wrappers_pass_everything_on() -> None:
    """The wrappers take what the operators take, in another order."""
    for case in (CASES[2], CASES[9]):
        arguments = make_call(case).arguments
        for got, wanted in zip(
            torch_kvq.remat_attention(**arguments),
            torch.ops.kvq.remat_attention(**arguments),
            strict=True,
        ):
            assert_same(got, wanted)


def test_a_masked_token_has_no_part() -> None:
    """NaN in raw inputs that no query may attend to."""
    case = next(c for c in CASES if c.id == "bits16")
    arguments = dict(make_call(case).arguments)
    arguments["attn_mask"] = torch.ones(1, 1, 1, 700, dtype=torch.bool)
    arguments["attn_mask"][..., [5 + 30, 690]] = False
    before = [torch.ops.kvq.remat_attention(**arguments, absorb_value=a)[0] for a in (False, True)]
    records, exact = arguments["records"][0].clone(), arguments["exact"].clone()
    raw = records.view(torch.float32).view(2, -1, 64, 128)
    raw[1, 0, 5] = torch.nan
    exact[1, 690 - 30 - 576] = torch.inf
    arguments |= {"records": [records], "exact": exact}
    for wanted, a in zip(before, (False, True), strict=True):
        assert_same(torch.ops.kvq.remat_attention(**arguments, absorb_value=a)[0][1], wanted[1])


def test_keys_and_values_never_exist_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(c for c in CASES if c.id == "long")
    sizes = []
    for name in ("keys", "values"):
        plain = getattr(remat.Weights, name)

        def spy(self: Any, x: Tensor, *rest: int, plain: Any = plain) -> Tensor:
            sizes.append(x.shape[0])
            return plain(self, x, *rest)

        monkeypatch.setattr(remat.Weights, name, spy)
    reference.remat_attention(**make_call(case).arguments, absorb_value=False)
    assert sum(sizes) == 2 * 2100 and max(sizes) <= remat.BLOCK_TOKENS == 512


def test_tokens_outside_the_window_are_not_read() -> None:
    case = next(c for c in CASES if c.id == "window")
    arguments = dict(make_call(case).arguments)
    wanted = torch.ops.kvq.remat_attention(**arguments)[0]
    broken = [part.clone() for part in arguments["records"]]
    broken[0][:, :8] = 0x7C
    arguments["records"] = broken
    assert_same(torch.ops.kvq.remat_attention(**arguments)[0], wanted)


@pytest.mark.parametrize("absorb", ((False, False), (False, True), (True, False), (True, True)))
@pytest.mark.parametrize("shape", ((1, 4, 4, 32, 32), (1, 8, 2, 32, 64), (40, 4, 1, 64, 32)))
def test_cost_is_what_is_counted(shape: tuple[int, ...], absorb: tuple[bool, bool]) -> None:
    queries, heads, kv_heads, key_dim, value_dim = shape
    case = Case("flops", lengths=((0, 700, 640),), queries=queries, heads=heads, kv_heads=kv_heads,
                key_dim=key_dim, value_dim=value_dim)  # fmt: skip
    with FlopCounterMode(display=False) as counter:
        reference.remat_attention(
            **make_call(case).arguments, absorb_key=absorb[0], absorb_value=absorb[1]
        )
    cost = torch_kvq.remat_flops(
        queries, 700, heads, kv_heads, key_dim, value_dim, 128,
        absorb_key=absorb[0], absorb_value=absorb[1],
    )  # fmt: skip
    assert abs(counter.get_total_flops() / cost - 1) < 0.02


def test_the_cheaper_way_is_taken() -> None:
    """By the shapes, unless the caller says otherwise."""
    call = make_call(Case("choice", lengths=((0, 700, 640),), queries=1))

    def flops(**options: bool) -> int:
        with FlopCounterMode(display=False) as counter:
            reference.remat_attention(**call.arguments, **options)
        return counter.get_total_flops()

    choice = torch_kvq.choose_absorption(1, 700, 4, 2, 32, 48, 128, positional_key=False)
    assert choice == (True, True)
    ways = [flops(absorb_key=k, absorb_value=v) for k in (False, True) for v in (False, True)]
    assert flops() == min(ways) < max(ways)
    assert torch_kvq.choose_absorption(1, 700, 4, 2, 32, 48, 128) == (False, True)
    assert torch_kvq.choose_absorption(500, 700, 4, 2, 32, 48, 128) == (False, False)


@pytest.mark.parametrize("id", ("rotary", "latent", "sum-plain", "mask-heads", "bits16-half"))
def test_opcheck(id: str) -> None:
    arguments = dict(make_call(next(c for c in CASES if c.id == id)).arguments)
    for name in ("exact", "value_exact"):
        if arguments[name] is not None:
            arguments[name] = arguments[name].nan_to_num()
    if 16 in arguments["bits"]:
        arguments["records"] = [torch.zeros_like(part) for part in arguments["records"]]
    torch.library.opcheck(torch.ops.kvq.remat_attention.default, (), arguments)
    names = ("query", "exact", "value_exact", "lengths", "attn_mask", "sinks", "scale",
             "is_causal", "softcap", "sliding_window")  # fmt: skip
    rest = {k: v for k, v in arguments.items() if k not in names}
    for name in ("records", "value_records"):
        rest[name] = [part[:, :9].contiguous() for part in rest[name]]
    torch.library.opcheck(torch.ops.kvq.remat_kv.default, (), rest)


def test_parameters_outside_of_no_grad() -> None:
    arguments = dict(make_call(CASES[2]).arguments)
    wanted = torch.ops.kvq.remat_attention(**arguments)[0]
    for name in ("key_weight", "value_weight", "key_bias"):
        arguments[name] = torch.nn.Parameter(arguments[name])
    assert_same(torch.ops.kvq.remat_attention(**arguments)[0].detach(), wanted)
