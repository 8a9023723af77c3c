"""A cache of two tiers: accuracy and bytes, retrieval, and the speed of its attention.

The speed is that of one decoding step on one thread, with data that are not in the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from . import environment, retrieval, tiered_accuracy, timing, yardstick
from .attention import Shape
from .model import model_and_text
from .registry import PLAIN_KERNEL, available_baselines, sdpa
from .report import Check, Column, Report, Table
from .timing import Contestant

SHAPES = (
    Shape(32, 8, 128, 1024),
    Shape(32, 8, 128, 4096),
    Shape(32, 8, 128, 8192),
    Shape(32, 8, 128, 16384),
    Shape(32, 8, 128, 32768),
    Shape(8, 8, 128, 4096),
    Shape(9, 3, 64, 4096),
)
BASELINES = ("SDPA float16", PLAIN_KERNEL)
"""What the tiers are timed against."""

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


@torch.inference_mode()
def run(quick: bool = False) -> Report:
    """Accuracy and retrieval, then the speed of both formats on every shape."""
    torch.set_num_threads(1)
    past, new = (512, 16) if quick else (1920, 128)
    mapped, steps = (320, 64) if quick else (896, 64)
    context = 2048 if quick else 4096
    shapes = SHAPES[:2] if quick else SHAPES
    model, ids = model_and_text(past + new)
    accuracy = tiered_accuracy.table(model, ids[:, : past + new], past)
    peaked, flat = (retrieval.table(context, topic) for topic in retrieval.TOPICS)
    tables = [
        accuracy,
        peaked,
        flat,
        tiered_accuracy.tier_map(model, ids[:, : mapped + 2 * steps], mapped),
    ]
    checks = tiered_accuracy.checks(accuracy) + retrieval.checks(peaked)
    checks += [check for far in tiers.FORMATS for check in gate(shapes[1], far)]
    if all(check.passed for check in checks):
        speed = [measure(shape, 5 if quick else 30) for shape in shapes]
        tables += [summary(shapes, speed), *speed]
    settings = {
        "model": f"SmolLM2-135M-Instruct, float32: {past} tokens of Python's documentation, then "
        f"{new} more, one by one; cosines over its recorded queries, keys and values",
        "bytes": f"{tiered_accuracy.TOKENS} tokens of a 16-bit model, everything in memory counted",
        "retrieval": retrieval.SETTING,
        "data": "for the speed: random keys with uneven channels; query and near tokens float16",
        "near": "a tenth of the tokens, those of the greatest weight; a fifth more slots",
        "shapes": "query heads / KV heads / head dim, one row, one query",
        PLAIN_KERNEL: yardstick.missing() or "float16 keys and values, compiled for this machine",
    }
    return Report("tiered", environment.describe(), settings, checks, tables)


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
        limit = 1 - tiered_accuracy.LEAST_COSINE
        checks.append(Check("fp8-int4, 1 - cosine, worst head of random keys", loss, limit))
    return checks


def exact(shape: Shape, query: Tensor) -> Tensor:
    """Attention over the tokens as they are."""
    key, value = make_tokens(shape.case())
    return sdpa(query, key, value)


def measure(shape: Shape, repeats: int) -> Table:
    """Time both formats and the baselines on a shape."""
    contestants, sizes = [], {}
    for far in tiers.FORMATS:
        layer = Tiers(shape, far)
        for tier in torch_kvq.cpu_capabilities().available:
            if tier in ("scalar", "reference"):
                continue
            name = contestant_name(far, tier)
            contestants.append(Contestant(name, layer.calls(), tier))
            sizes[name] = layer.nbytes
    key, value = (x.half() for x in make_tokens(shape.case()))
    query = make_query(shape.case()).half()
    copies = timing.cold_copies(lambda: (key.clone(), value.clone()), 2 * key.nbytes)
    for baseline in available_baselines():
        if baseline.name in BASELINES:
            calls = [partial(baseline.attend, query, *copy) for copy in copies]
            contestants.append(Contestant(baseline.name, calls))
            sizes[baseline.name] = 2 * key.nbytes
    times = timing.interleaved(contestants, repeats)
    plain = times[PLAIN_KERNEL].minimum if PLAIN_KERNEL in times else None
    rows = [
        {
            "name": item.name,
            "median": times[item.name].median,
            "iqr": times[item.name].iqr,
            "minimum": times[item.name].minimum,
            "speedup": plain and plain / times[item.name].minimum,
            "bytes": sizes[item.name] / (shape.tokens * shape.kv_heads),
        }
        for item in contestants
    ]
    return Table(shape.name, f"Two tiers, {shape}", COLUMNS, rows, is_speed=True)


def contestant_name(far: str, tier: str) -> str:
    """What the tables call a format on an instruction set."""
    return f"tiered_attention {far}, {tier}"


def summary(shapes: Sequence[Shape], measured: Sequence[Table]) -> Table:
    """How many times as long the baselines take as both formats, minima, on every shape."""
    tier = torch_kvq.cpu_capabilities().active
    columns = [Column("name", "shape")]
    columns += [
        Column(f"{far}, {name}", f"{far}, x of {name}", ".2f")
        for far in tiers.FORMATS
        for name in BASELINES
    ]
    rows = []
    for shape, table in zip(shapes, measured, strict=True):
        times = {row["name"]: row["minimum"] for row in table.rows}
        row: dict[str, Any] = {"name": str(shape)}
        for far in tiers.FORMATS:
            own = times.get(contestant_name(far, tier))
            for name in BASELINES:
                row[f"{far}, {name}"] = times[name] / own if own and name in times else None
        rows.append(row)
    title = f"Two tiers on {tier} against float16"
    return Table("summary", title, columns, rows, is_speed=True)
