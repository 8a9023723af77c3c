"""Speed of one decoding step's attention, one thread, data not in the caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_kvq
from tests.cases import Case, State, append_steps, empty_state, make_query, make_state, make_tokens
from tests.ops.compare import BUDGET, head_error
from torch_kvq import formats, reference
from torch_kvq._memory import empty_buffer

from . import adaptq, environment, timing, yardstick
from .registry import PLAIN_KERNEL, YARDSTICK, Baseline, available_baselines, sdpa
from .report import Check, Column, Report, Table, worst
from .timing import Contestant, Timing

BITS = (4, 3, 2)
THREADS = (1, 2)
THREAD_BITS = 4
LOGIT_STD = 1.5


@dataclass(frozen=True)
class Shape:
    """One layer and one new token.

    Attributes:
        heads: query heads.
        kv_heads: heads of keys and values.
        dim: channels of a head.
        tokens: keys and values that are attended to.
    """

    heads: int
    kv_heads: int
    dim: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads}/{self.dim}, {self.tokens} tokens"

    @property
    def name(self) -> str:
        """Name of the shape's table."""
        return f"{self.heads}-{self.kv_heads}-{self.dim}-{self.tokens}"

    def case(self, bits: int = 4) -> Case:
        """The shape as a case: all bits have the same id, hence the same keys and queries."""
        return Case(
            f"attention-{self.name}",
            bits=(bits, bits),
            key_dim=self.dim,
            value_dim=self.dim,
            heads=self.heads,
            kv_heads=self.kv_heads,
            steps=(self.tokens,),
            logit_std=LOGIT_STD,
        )


SHAPES = (
    Shape(32, 8, 128, 4096),
    Shape(32, 8, 128, 1024),
    Shape(32, 8, 128, 16384),
    Shape(9, 3, 64, 4096),
    Shape(4, 4, 128, 4096),
    Shape(4, 4, 128, 32768),
)

PEER_SHAPE = Shape(4, 4, 128, 4096)
"""Where AdapTQ is timed: that of its authors."""

PEER_TOLERANCE = {"its own decoded tokens": 1e-3, "exact attention, keys centred": 0.6}
"""Relative error of AdapTQ's worst head; its 4-bit codes are a quarter of a vector's norm off."""

COLUMNS = [
    Column("name", "attention"),
    Column("median", "median us", ".0f"),
    Column("iqr", "IQR us", ".0f"),
    Column("minimum", "min us", ".0f"),
    Column("per_token", "ns per token, KV head", ".1f"),
    Column("speedup", f"x of {YARDSTICK}", ".2f"),
    Column("bandwidth", "of read bandwidth", ".0%"),
]


@dataclass(frozen=True)
class Entry:
    """A contestant with the bytes of keys and values that one of its calls reads."""

    contestant: Contestant
    read_bytes: int


def run(quick: bool = False) -> Report:
    """Check, then time, every contestant on every shape."""
    torch.set_num_threads(1)
    shapes = (SHAPES[0], PEER_SHAPE) if quick else SHAPES
    checks = [check for shape in shapes for check in gate(shape)] + peer_gate()
    repeats = 5 if quick else 30
    tables: list[Table] = []
    if all(check.passed for check in checks):
        bandwidth = timing.read_bandwidth()
        tables = [measure(shape, bandwidth, repeats) for shape in shapes]
        peer_table = tables[shapes.index(PEER_SHAPE)]
        tables += [
            _summary(shapes, tables),
            _memory(bandwidth),
            *against_peers(peer_table, repeats),
        ]
        tables.append(_scaling_table([row for shape in shapes for row in scaling(shape, repeats)]))
    settings = {
        "data": "random keys with uneven channels, scores with a standard deviation of "
        f"{LOGIT_STD}; query, keys and values float32 unless named",
        "shapes": "query heads / KV heads / head dim, one row, one query",
        "repeats": f"{repeats}, interleaved, each on another copy of the data",
        PLAIN_KERNEL: yardstick.missing() or "float16 keys and values, compiled for this machine",
        adaptq.NAME: adaptq.describe(),
    }
    return Report("attention", environment.describe(), settings, worst(checks), tables)


def gate(shape: Shape) -> list[Check]:
    """Errors of all contestants: packed against the reference, others against float32."""
    query = make_query(shape.case())
    key, value = make_tokens(shape.case())
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    checks = [
        Check(item.name, head_error(_cast(item, query, key, value), exact), item.tolerance)
        for item in available_baselines()
    ]
    for bits in BITS:
        state = make_state(shape.case(bits), torch.ops.kvq.quantize_tile_)
        wanted, _ = reference.lut_attention(query, *state, key_bits=bits, value_bits=bits)
        for tier, precision in variants():
            with torch_kvq.cpu_capability(tier):
                out = lut_attention(query, state, bits, precision)
            name = variant_name(bits, precision, tier)
            checks.append(Check(name, head_error(out, wanted), BUDGET[precision]))
        if bits == THREAD_BITS:
            torch.set_num_threads(max(THREADS))
            out = lut_attention(query, state, bits, "exact")
            torch.set_num_threads(1)
            name = f"lut_attention {bits} bits, exact, {max(THREADS)} threads"
            checks.append(Check(name, head_error(out, wanted), BUDGET["exact"]))
    return checks


def peer_gate() -> list[Check]:
    """Errors of AdapTQ: against attention to the tokens that it holds, and to the true ones."""
    if adaptq.missing():
        return []
    query, key, value = _peer_inputs(centred=True)
    cache = adaptq.Cache(key, value)
    out = cache.attend(query)
    wanted = (sdpa(query, cache.decoded(key), cache.decoded(value)), sdpa(query, key, value))
    return [
        Check(f"{adaptq.NAME}, against {name}", head_error(out, exact), limit)
        for (name, limit), exact in zip(PEER_TOLERANCE.items(), wanted, strict=True)
    ]


def _peer_inputs(centred: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values; without what all keys have in common, attention is the same."""
    case = PEER_SHAPE.case()
    key, value = make_tokens(case)
    return make_query(case), key - key.mean(2, keepdim=True) if centred else key, value


def variants(with_scalar: bool = True) -> list[tuple[str, str]]:
    """Instruction sets of this machine with the precisions of the kernels."""
    tiers = [
        tier for tier in torch_kvq.cpu_capabilities().available if with_scalar or tier != "scalar"
    ]
    return [(tier, precision) for tier in tiers for precision in ("exact", "fast")]


def variant_name(bits: int, precision: str, tier: str) -> str:
    """What the report calls a kernel."""
    return f"lut_attention {bits} bits, {precision}, {tier}"


def lut_attention(query: Tensor, state: State, bits: int, precision: str) -> Tensor:
    """Packed attention with the fewest steps between the caller and the kernel."""
    out, _ = torch.ops.kvq.lut_attention(
        query, *state, key_bits=bits, value_bits=bits, precision=precision
    )
    return out


def measure(shape: Shape, bandwidth: float, repeats: int) -> Table:
    """Time all contestants on a shape."""
    entries = [*baselines(shape), *packed(shape), *peers(shape)]
    times = timing.interleaved([entry.contestant for entry in entries], repeats)
    yardstick = times[YARDSTICK].median
    rows = [
        _row(shape, entry, times[entry.contestant.name], yardstick, bandwidth) for entry in entries
    ]
    return Table(shape.name, f"Attention, {shape}", COLUMNS, rows, is_speed=True)


def baselines(shape: Shape) -> list[Entry]:
    """Attention on uncompressed keys and values."""
    query, tokens = make_query(shape.case()), make_tokens(shape.case())
    entries = []
    copies: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for item in available_baselines():
        key, value = (x.to(item.dtype) for x in tokens)
        size = key.nbytes + value.nbytes
        if item.dtype not in copies:
            pair = partial(_clone_pair, key, value)
            copies[item.dtype] = timing.cold_copies(pair, size)
        q = query.to(item.dtype)
        calls = [partial(item.attend, q, k, v) for k, v in copies[item.dtype]]
        entries.append(Entry(Contestant(item.name, calls), size))
    return entries


def packed(shape: Shape) -> list[Entry]:
    """The kernels on packed tokens."""
    query = make_query(shape.case())
    entries = []
    for bits in BITS:
        state = make_state(shape.case(bits), torch.ops.kvq.quantize_tile_)
        size = _read_bytes(state)
        copies = timing.cold_copies(partial(_pooled, state), size)
        for tier, precision in variants(with_scalar=shape == SHAPES[0] and bits == 4):
            calls = [partial(lut_attention, query, copy, bits, precision) for copy in copies]
            name = variant_name(bits, precision, tier)
            capability = None if tier == "reference" else tier
            entries.append(Entry(Contestant(name, calls, capability), size))
    return entries


def peers(shape: Shape) -> list[Entry]:
    """AdapTQ, where it is installed, at its shape."""
    if shape != PEER_SHAPE or adaptq.missing():
        return []
    query, key, value = _peer_inputs()
    size = adaptq.Cache(key, value).bytes
    copies = timing.cold_copies(partial(adaptq.Cache, key, value), size)
    calls = [partial(copy.attend, query) for copy in copies]
    return [Entry(Contestant(adaptq.NAME, calls), size)]


def against_peers(table: Table, repeats: int) -> list[Table]:
    """AdapTQ and the kernels: how fast with cold data, from a table, and warm, and how close."""
    if adaptq.missing():
        return []
    cold = {row["name"]: row["median"] for row in table.rows}
    contestants = _peer_contestants()
    warm = timing.interleaved(contestants, repeats)
    errors, centred = _peer_errors(contestants), _peer_errors(_peer_contestants(True), True)
    columns = [
        Column("name", "attention"),
        Column("cold", "median us", ".0f"),
        Column("cold_speedup", "x of AdapTQ", ".2f"),
        Column("warm", "data warm, us", ".0f"),
        Column("warm_speedup", "x of AdapTQ", ".2f"),
        Column("error", "error", ".3f"),
        Column("centred", "error, keys centred", ".3f"),
    ]
    rows = [
        {
            "name": name,
            "cold": cold[name],
            "cold_speedup": cold[adaptq.NAME] / cold[name],
            "warm": time.median,
            "warm_speedup": warm[adaptq.NAME].median / time.median,
            "error": errors[name],
            "centred": centred[name],
        }
        for name, time in warm.items()
    ]
    return [Table("adaptq", f"Against AdapTQ, {PEER_SHAPE}", columns, rows, is_speed=True)]


def _peer_contestants(centred: bool = False) -> list[Contestant]:
    """AdapTQ and the kernels of the same bits, each on one copy of the data."""
    query, key, value = _peer_inputs(centred)
    found = [Contestant(adaptq.NAME, [partial(adaptq.Cache(key, value).attend, query)])]
    case = PEER_SHAPE.case(adaptq.BITS)
    state = empty_state(case)
    append_steps(case, state, torch.ops.kvq.quantize_tile_, key, value)
    state = _pooled(state)
    for tier, precision in variants(with_scalar=False):
        call = partial(lut_attention, query, state, adaptq.BITS, precision)
        found.append(Contestant(variant_name(adaptq.BITS, precision, tier), [call], tier))
    return found


def _peer_errors(contestants: list[Contestant], centred: bool = False) -> dict[str, float]:
    """Relative errors of the worst head against attention to the exact tokens."""
    exact = sdpa(*_peer_inputs(centred))
    return {item.name: head_error(item.result(), exact) for item in contestants}


def _pooled(state: State) -> State:
    """A copy with its pages as in a growing cache: in order, in huge ones if there are any."""
    tiles = empty_buffer(state.tiles.shape, state.tiles)
    pages = -(-int(state.lengths[0, formats.QUANTIZED]) // formats.TILE_TOKENS)
    tiles[:pages].copy_(state.tiles[state.block_table[0, :pages]])
    table = torch.arange(pages, dtype=torch.int32).unsqueeze(0)
    return state.clone()._replace(tiles=tiles, block_table=table)


def _cast(item: Baseline, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return item.attend(*(x.to(item.dtype) for x in (query, key, value))).float()


def _clone_pair(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return key.clone(), value.clone()


def _read_bytes(state: State) -> int:
    """Bytes of the records in use and of the exact tokens."""
    pages = int(state.lengths[0, 2]) // 64
    return pages * state.tiles[0].nbytes + state.exact_key.nbytes + state.exact_value.nbytes


def _row(
    shape: Shape, entry: Entry, time: Timing, yardstick: float, bandwidth: float
) -> dict[str, Any]:
    return {
        "name": entry.contestant.name,
        "median": time.median,
        "iqr": time.iqr,
        "minimum": time.minimum,
        "per_token": 1e3 * time.median / (shape.tokens * shape.kv_heads),
        "speedup": yardstick / time.median,
        "bandwidth": entry.read_bytes / (time.median * 1e-6) / bandwidth,
    }


def _summary(shapes: Sequence[Shape], tables: list[Table]) -> Table:
    """The multiples of the yardstick on all shapes."""
    columns = [Column("name", f"x of {YARDSTICK}")]
    columns += [Column(shape.name, str(shape), ".2f") for shape in shapes]
    rows: dict[str, dict[str, Any]] = {}
    for shape, table in zip(shapes, tables, strict=True):
        for row in table.rows:
            name = row["name"]
            rows.setdefault(name, {"name": name})[shape.name] = row["speedup"]
    return Table("summary", "Attention, all shapes", columns, list(rows.values()), is_speed=True)


def scaling(shape: Shape, repeats: int) -> list[dict[str, Any]]:
    """What more threads gain on a shape; one number of threads at a time, a change costs."""
    query = make_query(shape.case())
    state = make_state(shape.case(THREAD_BITS), torch.ops.kvq.quantize_tile_)
    copies = timing.cold_copies(partial(_pooled, state), _read_bytes(state))
    calls = [partial(lut_attention, query, copy, THREAD_BITS, "exact") for copy in copies]
    rows: list[dict[str, Any]] = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        time = timing.interleaved([Contestant(str(shape), calls)], repeats)[str(shape)]
        rows.append({"name": str(shape), "threads": threads, **asdict(time)})
    torch.set_num_threads(1)
    return [{**row, "speedup": rows[0]["median"] / row["median"]} for row in rows]


def _scaling_table(rows: list[dict[str, Any]]) -> Table:
    columns = [
        Column("name", f"lut_attention {THREAD_BITS} bits, exact"),
        Column("threads", "threads", "d"),
        *COLUMNS[1:4],
        Column("speedup", "x of 1 thread", ".2f"),
    ]
    return Table("threads", "Attention on several threads", columns, rows, is_speed=True)


def _memory(bandwidth: float) -> Table:
    columns = [Column("name", ""), Column("value", "GB/s", ".1f")]
    rows = [{"name": "read bandwidth of one thread", "value": bandwidth / 1e9}]
    return Table("bandwidth", "Memory", columns, rows, is_speed=True)
