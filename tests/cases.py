"""The one case table: layers, queries and masks for the tests and the benchmarks."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_kvq import formats, reference

Bits = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """One layer and the call that attends to it.

    ``steps`` are the tokens of each append; a negative step cuts as many tokens off every row.
    ``starts`` is the left padding of the rows and sets the batch size.
    """

    id: str
    bits: Bits = (4, 4)
    key_dim: int = 64
    value_dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    dtype: torch.dtype = torch.float32
    starts: tuple[int, ...] = (0,)
    steps: tuple[int, ...] = (330,)
    queries: int = 1
    is_causal: bool = False
    mask: str | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    sink_tokens: int = 4
    residual_length: int = 64
    quantized_start: int = 256
    shared_pages: bool = False
    data: str = "normal"
    logit_std: float = 1.5

    def __str__(self) -> str:
        """Name of the case in a test report."""
        return self.id

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return len(self.starts)

    @property
    def length(self) -> int:
        """Positions of every row after the steps, padding included."""
        return sum(self.steps)

    @property
    def layout(self) -> formats.TileFormat:
        """Format of the records."""
        return formats.TileFormat(
            self.key_dim, self.value_dim, *self.bits, itemsize=self.dtype.itemsize
        )

    def rule(self) -> dict[str, int]:
        """Keyword arguments of an append that say when tokens become tiles."""
        return {
            "sink_tokens": self.sink_tokens,
            "residual_length": self.residual_length,
            "quantized_start": self.quantized_start,
        }

    def generator(self, purpose: str) -> torch.Generator:
        """Random numbers that depend on the case and the purpose only."""
        return torch.Generator().manual_seed(zlib.crc32(f"{self.id}/{purpose}".encode()))


class State(NamedTuple):
    """State of a layer in the order of the operators' arguments."""

    tiles: Tensor
    block_table: Tensor
    balance: Tensor
    exact_key: Tensor
    exact_value: Tensor
    lengths: Tensor

    def clone(self) -> State:
        """Copy of every tensor."""
        return State(*(tensor.clone() for tensor in self))


def _row_history(case: Case, start: int) -> Iterator[tuple[int, int]]:
    """Tokens and quantised tokens of a row after every step."""
    length = quantized = 0
    for step in case.steps:
        length += step
        tokens = max(length - start, 0)
        if step < 0:
            quantized = min(quantized, max(tokens - case.sink_tokens, 0))
        else:
            quantized = formats.quantized_tokens(tokens, quantized, **case.rule())
        yield tokens, quantized


def empty_state(case: Case) -> State:
    """State without tokens: exactly large enough, pages shuffled, all memory poisoned."""
    history = [use for start in case.starts for use in _row_history(case, start)]
    capacity = max((tokens - quantized for tokens, quantized in history), default=0)
    pages = max((-(-quantized // 64) for _, quantized in history), default=0) + 1
    total = case.batch * pages + 1
    heads, record_bytes = case.kv_heads, case.layout.record_bytes
    table = torch.randperm(total, generator=case.generator("pages"))[: case.batch * pages]
    lengths = torch.zeros(case.batch, 3, dtype=torch.int32)
    lengths[:, formats.START] = torch.tensor(case.starts)
    return State(
        torch.full((total, heads, record_bytes), 0xFF, dtype=torch.uint8),
        table.int().view(case.batch, pages),
        torch.full((case.batch, heads, case.key_dim), torch.nan),
        torch.full((case.batch, heads, capacity, case.key_dim), torch.nan, dtype=case.dtype),
        torch.full((case.batch, heads, capacity, case.value_dim), torch.nan, dtype=case.dtype),
        lengths,
    )


def make_tokens(case: Case) -> tuple[Tensor, Tensor]:
    """Keys and values of all appends, with uneven channels as in real keys."""
    tokens = sum(step for step in case.steps if step > 0)
    batch = 1 if case.shared_pages else case.batch
    shape, generator = (batch, case.kv_heads, tokens), case.generator("tokens")
    spread = torch.rand(case.kv_heads, 1, case.key_dim, generator=generator) * 2 + 0.2
    offset = torch.randn(case.kv_heads, 1, case.key_dim, generator=generator) * 2
    key = torch.randn(*shape, case.key_dim, generator=generator) * spread + offset
    value = torch.randn(*shape, case.value_dim, generator=generator)
    key, value = (x.to(case.dtype) for x in DATA[case.data](key, value))
    return key.expand(case.batch, -1, -1, -1), value.expand(case.batch, -1, -1, -1)


def _large(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of norm 1e5 around a common direction."""
    direction = torch.ones(key.shape[-1])
    direction[::3] = -1
    return key * 100 + 1e5 / key.shape[-1] ** 0.5 * direction, value * 1e4


def _outliers(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    key, value = key.clone(), value.clone()
    key[..., 5] *= 200
    key[..., 7::50, :] *= 30
    value[..., 3::40, :] *= 50
    return key, value


DATA: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "normal": lambda key, value: (key, value),
    "zeros": lambda key, value: (key * 0, value * 0),
    "tiny": lambda key, value: (key * 1e-30, value * 1e-30),
    "equal": lambda key, value: (key[:, :, :1].expand_as(key), value[:, :, :1].expand_as(value)),
    "large": _large,
    "outliers": _outliers,
}


def append_steps(
    case: Case, state: State, append: Callable[..., None], key: Tensor, value: Tensor
) -> None:
    """Take the steps of a case on a state in place."""
    used = 0
    for step in case.steps:
        if step < 0:
            cut(state, -step, case.sink_tokens)
            continue
        new = (x[:, :, used : used + step] for x in (key, value))
        append(*state, *new, *case.bits, **case.rule())
        used += step


def cut(state: State, tokens: int, sink_tokens: int) -> None:
    """Take the last tokens off every row, which may leave a partial tile."""
    lengths = state.lengths
    lengths[:, formats.LENGTH] -= tokens
    left = lengths[:, formats.LENGTH] - lengths[:, formats.START] - sink_tokens
    lengths[:, formats.QUANTIZED].clamp_(max=left.clamp(min=0))


def poison_unused(state: State, pass_through: bool = False) -> None:
    """Overwrite everything that a reader must not look at."""
    for row, (start, length, quantized) in enumerate(state.lengths.tolist()):
        held = max(length - start, 0) - quantized
        state.exact_key[row, :, held:] = torch.nan
        state.exact_value[row, :, held:] = torch.nan
        state.block_table[row, -(-quantized // 64) :] = -(2**30) - row
        if quantized == 0 or pass_through:
            state.balance[row] = torch.nan


def make_state(case: Case, append: Callable[..., None] = reference.quantize_tile_) -> State:
    """State of a case after its steps, built by an implementation of the append."""
    state = empty_state(case)
    append_steps(case, state, append, *make_tokens(case))
    if case.shared_pages:
        state.tiles[state.block_table[1:].flatten().long()] = 0xFF
        state.block_table[1:] = state.block_table[:1].clone()
    poison_unused(state, case.layout.is_pass_through)
    return state


def make_query(case: Case) -> Tensor:
    """Queries whose scores have about the standard deviation of the case."""
    shape = (case.batch, case.heads, case.queries, case.key_dim)
    query = torch.randn(shape, generator=case.generator("query"))
    key = make_tokens(case)[0].float()
    norm = float((key - key.mean(2, keepdim=True)).norm(dim=-1).mean()) if key.numel() else 0.0
    scale = case.key_dim**-0.5 if case.scale is None else case.scale
    return (query * case.logit_std / (scale * max(norm, 1.0))).to(case.dtype)


def _keep(case: Case, *shape: int) -> Tensor:
    return torch.rand(shape, generator=case.generator("mask")) < 0.7


def _bias(case: Case, *shape: int) -> Tensor:
    return torch.randn(shape, generator=case.generator("mask"))


def _hidden(case: Case, mask: Tensor, value: float) -> Tensor:
    """Additive mask with masked keys, and one query of every row that sees none."""
    mask = mask.masked_fill(~_keep(case, *mask.shape), value)
    mask[:, :, 0] = value
    return mask


MASKS: dict[str, Callable[[Case, int, int, int, int], Tensor]] = {
    "bool": lambda case, b, h, q, n: _keep(case, b, 1, q, n),
    "bool_heads": lambda case, b, h, q, n: _keep(case, 1, h, q, n),
    "bool_columns": lambda case, b, h, q, n: _keep(case, b, 1, 1, n),
    "bool_empty_heads": lambda case, b, h, q, n: _keep(case, b, h, q, n).mul(
        torch.arange(h).view(h, 1, 1) % 2 > 0
    ),
    "bool_wide": lambda case, b, h, q, n: _keep(case, b, 1, q, n + 9),
    "additive": lambda case, b, h, q, n: _bias(case, b, 1, q, n),
    "additive_heads": lambda case, b, h, q, n: _bias(case, b, h, q, n).to(case.dtype),
    "additive_inf": lambda case, b, h, q, n: _hidden(case, _bias(case, b, h, q, n), -torch.inf),
    "additive_min": lambda case, b, h, q, n: _hidden(
        case, torch.zeros(b, 1, q, n, dtype=case.dtype), torch.finfo(case.dtype).min
    ),
    "additive_wide": lambda case, b, h, q, n: torch.nn.functional.pad(
        _bias(case, b, 1, q, n), (0, 5), value=torch.nan
    ),
}


def make_mask(case: Case) -> Tensor | None:
    """Mask of a case, bool or additive, by its kind."""
    shape = (case.batch, case.heads, case.queries, case.length)
    return None if case.mask is None else MASKS[case.mask](case, *shape)


def attention_arguments(case: Case) -> dict[str, Any]:
    """Everything but query and state of an attention call."""
    sinks = torch.randn(case.heads, generator=case.generator("sinks")).to(case.dtype)
    return {
        "attn_mask": make_mask(case),
        "key_bits": case.bits[0],
        "value_bits": case.bits[1],
        "sink_tokens": case.sink_tokens,
        "scale": case.scale,
        "is_causal": case.is_causal,
        "sliding_window": case.sliding_window,
        "softcap": case.softcap,
        "sinks": sinks if case.sinks else None,
    }


class Expected(NamedTuple):
    """What the reference makes of a case; shared between tests, so not to be written to."""

    state: State
    query: Tensor
    arguments: dict[str, Any]
    out: Tensor
    lse: Tensor


@functools.cache
def expected(case: Case) -> Expected:
    """State, call and result of a case by the reference; ``out`` is float32."""
    state, query, arguments = make_state(case), make_query(case), attention_arguments(case)
    out, lse = reference.lut_attention(query.float(), *state, **arguments)
    return Expected(state, query, arguments, out, lse)


BITS: tuple[Bits, ...] = ((4, 4), (3, 3), (2, 2), (4, 3), (4, 2), (3, 2), (16, 16))
DIMS = (32, 48, 64, 80, 96, 112, 128, 144, 192, 256, 512)
DIM_PAIRS = ((64, 128), (128, 64), (192, 128), (96, 80), (48, 256), (32, 144))
GROUPS = (1, 2, 3, 4, 7, 8, 16)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FROM_ZERO = (0, 1, 4, 5, 63, 64, 65, 131, 132, 133, 195, 196)
FROM_256 = (255, 256, 257, 259, 260, 323, 324, 325, 387, 388, 700)
QUERIES = (1, 2, 17, 64)


def _cycle(values: tuple[Any, ...], i: int) -> Any:
    return values[i % len(values)]


def _layouts() -> Iterator[Case]:
    for i, dim in enumerate(DIMS):
        bits, dtype = _cycle(BITS, i), _cycle(DTYPES, i)
        yield Case(f"dim{dim}", bits, dim, dim, dtype=dtype, steps=(270, 61), is_causal=True)
        if bits != (4, 4):
            yield Case(f"dim{dim}-4bit", (4, 4), dim, dim, queries=2, is_causal=True)
    for i, (key_dim, value_dim) in enumerate(DIM_PAIRS):
        yield Case(f"dims{key_dim}-{value_dim}", _cycle(BITS, i), key_dim, value_dim, queries=3)
    for i, bits in enumerate(BITS):
        for j, dim in enumerate((64, 128)):
            dtype = _cycle(DTYPES, i + j + 1)
            yield Case(f"bits{bits[0]}-{bits[1]}-dim{dim}", bits, dim, dim, dtype=dtype)
    for i, group in enumerate(GROUPS):
        yield Case(f"group{group}", _cycle(BITS, i), heads=2 * group, queries=3, is_causal=True)
    yield Case("mqa", heads=7, kv_heads=1, queries=5, is_causal=True)


def _lengths() -> Iterator[Case]:
    for i, n in enumerate(FROM_ZERO):
        steps = (n - 1, 1) if n else (0,)
        yield Case(f"length{n}", _cycle(BITS, i), steps=steps, quantized_start=0)
    for i, n in enumerate(FROM_256):
        yield Case(f"length{n}", _cycle(BITS[:6], i), dtype=_cycle(DTYPES, i), steps=(n - 2, 1, 1))
    one_by_one = (250,) + (1,) * 80
    yield Case("decode", steps=one_by_one)
    yield Case("decode-no-window", (3, 3), steps=one_by_one, residual_length=0, sink_tokens=0)
    yield Case("chunks", (4, 3), steps=(100, 300, 7, 64, 65, 63), queries=63, is_causal=True)
    names = ("sink_tokens", "residual_length", "quantized_start")
    for i, rule in enumerate(((0, 64, 0), (1, 0, 128), (7, 16, 256), (4, 128, 0))):
        options: dict[str, Any] = dict(zip(names, rule, strict=True))
        yield Case(f"rule{rule}", _cycle(BITS, i), steps=(3, 297, 40), **options)
    for i, bits in enumerate(((4, 4), (3, 2), (2, 2), (16, 16))):
        yield Case(f"cut{i}", bits, steps=(330, -120), queries=4, is_causal=True)
        yield Case(f"cut{i}-refill", bits, steps=(330, -120, 17, 90, 64), starts=(0, 5))
    yield Case("long", steps=(2300,), queries=2, is_causal=True)
    yield Case("long-padded", (3, 2), starts=(0, 1900), steps=(2300,), sinks=True)
    yield Case("long-window", (4, 3), steps=(2300,), queries=3, sliding_window=150, is_causal=True)
    yield Case("cut-to-sinks", steps=(330, -327), queries=2, is_causal=True)
    yield Case("cut-to-nothing", steps=(330, -330, 300))


def _batches() -> Iterator[Case]:
    for i, starts in enumerate(((0, 3), (0, 70, 300), (129, 0, 64, 330))):
        options: dict[str, Any] = {"dtype": _cycle(DTYPES, i + 1), "starts": starts}
        yield Case(f"padded{i}", _cycle(BITS, 2 * i), queries=1, **options)
        options |= {"steps": (64, 300), "queries": 64, "is_causal": True}
        yield Case(f"padded{i}-causal", (4, 3), **options)
    yield Case("shared", starts=(0, 0, 0), shared_pages=True, queries=2, is_causal=True)
    yield Case("shared-3bit", (3, 3), starts=(0, 0), shared_pages=True, dtype=torch.bfloat16)


def _masks() -> Iterator[Case]:
    for i, n in enumerate(QUERIES):
        yield Case(f"queries{n}", _cycle(BITS, i), queries=n, is_causal=True)
        yield Case(f"queries{n}-full", _cycle(BITS, i + 1), queries=n, dtype=torch.bfloat16)
    yield Case("queries-before-start", steps=(9,), starts=(0, 4), queries=17, is_causal=True)
    for i, kind in enumerate(MASKS):
        dtype, bits = _cycle(DTYPES, i), _cycle(BITS, i)
        yield Case(f"mask-{kind}", bits, dtype=dtype, mask=kind, starts=(0, 2), queries=1 + i % 3)
    yield Case("mask-and-causal", mask="bool_heads", queries=17, is_causal=True, starts=(0, 77))
    for i, window in enumerate((1, 1000, 64, 100, 16)):
        options: dict[str, Any] = {"sliding_window": window, "is_causal": True}
        yield Case(f"window{window}", _cycle(BITS, i), queries=1 + 8 * i, starts=(0, 40), **options)
    yield Case("window-not-causal", sliding_window=70, queries=3)
    yield Case("softcap5", softcap=5.0, logit_std=6.0, queries=2, is_causal=True)
    yield Case("softcap30", (3, 3), softcap=30.0, mask="additive_inf", dtype=torch.float16)
    yield Case("sinks", sinks=True, queries=2, mask="bool_empty_heads", dtype=torch.bfloat16)
    yield Case("sinks-nothing", sinks=True, steps=(0,))
    options = {"is_causal": True, "sliding_window": 90, "softcap": 20.0, "mask": "additive_min"}
    yield Case("everything", (4, 2), sinks=True, queries=17, starts=(0, 33), **options)
    for std in (0.3, 3.0, 6.0):
        yield Case(f"logits{std}", logit_std=std, key_dim=128, value_dim=128)
    yield Case("scale", scale=0.2, dtype=torch.float16)
    for data in DATA:
        yield Case(f"data-{data}", data=data, queries=2)
        yield Case(f"data-{data}-3bit", (3, 2), data=data, dtype=torch.bfloat16)
        yield Case(f"data-{data}-half", data=data, dtype=torch.float16, key_dim=128)


CASES = (*_layouts(), *_lengths(), *_batches(), *_masks())
