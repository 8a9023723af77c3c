"""Attention over two tiers, one decoding step on one thread, data not in the caches."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_kvq
from tests import tiers
from tests.cases import make_query, make_tokens
from tests.ops.compare import BUDGET, head_error
from tests.tiers import TieredState
from torch_kvq import formats, reference
from torch_kvq._memory import empty_buffer

from . import environment, timing, yardstick
from .attention import Shape
from .registry import PLAIN_KERNEL, sdpa
from .report import Check, Column, Report, Table
from .timing import Contestant

SHAPES = (
    Shape(32, 8, 128, 1024),
    Shape(32, 8, 128, 4096),
    Shape(32, 8, 128, 32768),
    Shape(8, 8, 128, 4096),
    Shape(9, 3, 64, 4096),
)
LEAST_COSINE = 0.995

COLUMNS = [
    Column("name", "attention"),
    Column("median", "median us", ".0f"),
    Column("iqr", "IQR us", ".0f"),
    Column("minimum", "min us", ".0f"),
    Column("speedup", f"x of {PLAIN_KERNEL}, minima", ".2f"),
    Column("bytes", "bytes per token, KV head", ".0f"),
]


class Tiers:
    """A layer with a tenth of its tokens near, those with the greatest weight.

    Attributes:
        query: float16 ``[1, heads, 1, dim]``.
        state: the layer, with a fifth more near slots than are used.
        options: the other arguments of the operator.
    """

    def __init__(self, shape: Shape, far: str) -> None:
        case = shape.case()
        state, balance = tiers.make_tiers(case, far, torch.ops.kvq)
        query = make_query(case)
        tiers.choose_near(case, state, query)
        used = -(-int(state.lengths[0, formats.QUANTIZED]) // formats.TILE_TOKENS)
        slots = int(state.near_count.max()) * 6 // 5
        tiles = empty_buffer((used, *state.tiles.shape[1:]), state.tiles)
        self.state = TieredState(
            state.near_key[:, :, :slots].half(),
            state.near_value[:, :, :slots].half(),
            state.near_index[:, :, :slots].contiguous(),
            state.near_count,
            tiles.copy_(state.tiles[state.block_table[0, :used].long()]),
            torch.arange(used, dtype=torch.int32).unsqueeze(0),
            state.promoted[:, :, :used].contiguous(),
            state.lengths,
        )
        self.query = query.half()
        self.options: dict[str, Any] = {"far": far, "balance": balance}

    @property
    def nbytes(self) -> int:
        """Everything that grows with the tokens."""
        return sum(x.nbytes for x in self.state)

    def calls(self) -> list[partial[Any]]:
        """The operator on as many copies as keep the data out of the caches."""
        copies = timing.cold_copies(self._copy, self.nbytes)
        attend = torch.ops.kvq.tiered_attention
        return [partial(attend, self.query, *copy, **self.options) for copy in copies]

    def _copy(self) -> TieredState:
        """What is large lies in huge pages, if there are any, as in a cache."""
        large = ("near_key", "near_value", "tiles")
        copies = {name: getattr(self.state, name) for name in large}
        copies = {name: empty_buffer(x.shape, x).copy_(x) for name, x in copies.items()}
        return self.state.clone()._replace(**copies)


def run(quick: bool = False) -> Report:
    """Check, then time, both formats on every shape."""
    torch.set_num_threads(1)
    shapes = SHAPES[:2] if quick else SHAPES
    checks = [check for far in tiers.FORMATS for check in gate(shapes[1], far)]
    tables: list[Table] = []
    if all(check.passed for check in checks):
        tables = [measure(shape, 5 if quick else 30) for shape in shapes]
    settings = {
        "data": "random keys with uneven channels; query, near keys and values float16",
        "near": "a tenth of the tokens, those of the greatest weight; a fifth more slots",
        "shapes": "query heads / KV heads / head dim, one row, one query",
        PLAIN_KERNEL: yardstick.missing() or "float16 keys and values, compiled for this machine",
    }
    return Report("tiers", environment.describe(), settings, checks, tables)


def gate(shape: Shape, far: str) -> list[Check]:
    """Errors of every instruction set against the reference, and what the format loses."""
    layer = Tiers(shape, far)
    query = layer.query.float()
    wanted = reference.tiered_attention(query, *layer.state, **layer.options)[0]
    checks = []
    for tier in torch_kvq.cpu_capabilities().available:
        with torch_kvq.cpu_capability(tier):
            out = torch.ops.kvq.tiered_attention(query, *layer.state, **layer.options)[0]
        checks.append(Check(f"{far}, {tier}", head_error(out, wanted), BUDGET["exact"]))
    loss = 1 - float(torch.cosine_similarity(wanted, exact(shape, query), -1).min())
    if far == "fp8-int4":
        checks.append(Check("fp8-int4, 1 - cosine of the worst head", loss, 1 - LEAST_COSINE))
    return checks


def exact(shape: Shape, query: Tensor) -> Tensor:
    """Attention over the tokens as they are."""
    key, value = make_tokens(shape.case())
    return sdpa(query, key, value)


def measure(shape: Shape, repeats: int) -> Table:
    """Time both formats and the plain kernel on a shape."""
    contestants, sizes = [], {}
    for far in tiers.FORMATS:
        layer = Tiers(shape, far)
        for tier in torch_kvq.cpu_capabilities().available:
            if tier in ("scalar", "reference"):
                continue
            name = f"tiered_attention {far}, {tier}"
            contestants.append(Contestant(name, layer.calls(), tier))
            sizes[name] = layer.nbytes
    if not yardstick.missing():
        key, value = (x.half() for x in make_tokens(shape.case()))
        copies = timing.cold_copies(lambda: (key.clone(), value.clone()), 2 * key.nbytes)
        query = make_query(shape.case()).half()
        calls = [partial(yardstick.attend, query, *copy) for copy in copies]
        contestants.append(Contestant(PLAIN_KERNEL, calls))
        sizes[PLAIN_KERNEL] = 2 * key.nbytes
    times = timing.interleaved(contestants, repeats)
    plain = times[PLAIN_KERNEL].minimum if PLAIN_KERNEL in times else float("nan")
    rows = [
        {
            "name": item.name,
            "median": times[item.name].median,
            "iqr": times[item.name].iqr,
            "minimum": times[item.name].minimum,
            "speedup": plain / times[item.name].minimum,
            "bytes": sizes[item.name] / (shape.tokens * shape.kv_heads),
        }
        for item in contestants
    ]
    return Table(shape.name, f"Two tiers, {shape}", COLUMNS, rows, is_speed=True)
