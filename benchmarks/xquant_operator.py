"""Attention over cached layer inputs alone: absorbed weights, and the count of operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from torch_kvq import quantize_x, reference, remat_attention, remat_flops

from .report import Check, Column, Table
from .timing import Contestant, interleaved

BITS = 4
RECENT = 128
"""Tokens that are exact."""

COUNTED_TOKENS = 640
"""A block, another one that is not full, and exact tokens."""

COUNTED_QUERIES = (1, 16)
LEAST_GAIN = 1.6
COUNT_ERROR = 0.2
DIFFERENCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Relative error of the worst head that rounding explains."""

WAYS = {
    "rematerialised": (False, False),
    "values absorbed": (False, True),
    "keys and values absorbed": (True, True),
}
"""Whether keys and values are absorbed."""


@dataclass(frozen=True)
class Shape:
    """A layer whose keys and values are made of its input.

    Attributes:
        heads: query heads.
        kv_heads: heads of keys and values.
        dim: channels of a head.
        channels: channels of the input.
        is_rotary: keys have a rotary embedding.
    """

    heads: int
    kv_heads: int
    dim: int
    channels: int
    is_rotary: bool = True

    def __str__(self) -> str:
        kind = "" if self.is_rotary else ", absolute positions"
        return f"{self.heads}/{self.kv_heads}/{self.dim}, {self.channels} channels{kind}"

    @property
    def ways(self) -> dict[str, tuple[bool, bool]]:
        """Those of `WAYS` that are possible."""
        return {name: way for name, way in WAYS.items() if not (self.is_rotary and way[0])}


SHAPES = (
    Shape(9, 9, 64, 576),
    Shape(12, 12, 64, 768, is_rotary=False),
    Shape(16, 16, 128, 2048),
)
MOST_CHANNELS = SHAPES[-1].channels
COUNTED_SHAPES = (*SHAPES[:2], Shape(9, 3, 64, 576), Shape(16, 16, 128, 2048, is_rotary=False))


class Layer:
    """Cached inputs, weights and queries of a layer.

    Args:
        shape: of the layer.
        tokens: cached ones.
        queries: new tokens, the last of the cached ones.
        dtype: of everything that is not packed.
    """

    def __init__(self, shape: Shape, tokens: int, queries: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        x = normal(1, tokens, shape.channels)
        packed = tokens - RECENT
        weight = (shape.kv_heads * shape.dim, shape.channels)
        angle = torch.randn(1, tokens, shape.dim // 2, generator=generator).repeat(1, 1, 2)
        self.shape, self.tokens = shape, tokens
        self.query = normal(1, shape.heads, queries, shape.dim)
        self.records = [quantize_x(x[:, :packed], BITS)]
        self.exact = x[:, packed:]
        self.lengths = torch.tensor([[0, tokens, packed]], dtype=torch.int32)
        self.projection: dict[str, Any] = {
            "key_weight": normal(*weight) / shape.channels**0.5,
            "value_weight": normal(*weight) / shape.channels**0.5,
            "cos": angle.cos().to(dtype) if shape.is_rotary else None,
            "sin": angle.sin().to(dtype) if shape.is_rotary else None,
            "bits": [BITS],
            "kv_heads": shape.kv_heads,
        }

    def attend(self, way: str) -> Tensor:
        """The operator."""
        key, value = WAYS[way]
        return remat_attention(
            self.query,
            self.records,
            self.exact,
            self.lengths,
            **self.projection,
            absorb_key=key,
            absorb_value=value,
        )[0]

    def flops(self, way: str) -> int:
        """Operations by the cost model."""
        shape = self.shape
        key, value = WAYS[way]
        sizes = self.query.shape[2], self.tokens, shape.heads, shape.kv_heads, shape.dim, shape.dim
        return remat_flops(*sizes, shape.channels, absorb_key=key, absorb_value=value)

    def counted_flops(self, way: str) -> int:
        """Operations of the matrix products that are run, of which the operator hides its own."""
        key, value = WAYS[way]
        with FlopCounterMode(display=False) as counter:
            reference.remat_attention(
                self.query,
                self.records,
                [],
                self.exact,
                None,
                self.lengths,
                **self.projection,
                absorb_key=key,
                absorb_value=value,
            )
        return int(counter.get_total_flops())


def measure(
    tokens: int, repeats: int, shapes: Sequence[Shape] = SHAPES
) -> tuple[Table, list[Check]]:
    """Time every way on every shape, and hold the ways to one another.

    Args:
        tokens: cached ones.
        repeats: of each call; more where there are fewer channels.
        shapes: layers.
    """
    columns = [
        Column("shape", "heads / KV heads / head dim"),
        Column("dtype", "weights"),
        Column("name", "way"),
        Column("median", "median ms", ".2f"),
        Column("iqr", "IQR ms", ".2f"),
        Column("minimum", "min ms", ".2f"),
        Column("speedup", "x of rematerialised, minima", ".2f"),
        Column("gigaflops", "GFLOP", ".2f"),
    ]
    plain = next(iter(WAYS))
    rows: list[dict[str, Any]] = []
    checks = []
    for shape in shapes:
        for dtype, limit in DIFFERENCE.items():
            name = str(dtype).removeprefix("torch.")
            layer = Layer(shape, tokens, 1, dtype)
            want = layer.attend(plain)
            calls = [Contestant(way, [partial(layer.attend, way)]) for way in shape.ways]
            # The shorter the calls, the more of them a noisy machine takes to let one pass.
            times = interleaved(calls, repeats * max(1, MOST_CHANNELS // shape.channels))
            for way, found in times.items():
                row: dict[str, Any] = {"shape": str(shape), "dtype": name, "name": way}
                row |= {"median": found.median / 1e3, "iqr": found.iqr / 1e3}
                row |= {"minimum": found.minimum / 1e3, "gigaflops": layer.flops(way) / 1e9}
                row["speedup"] = times[plain].minimum / found.minimum
                rows.append(row)
                if way != plain:
                    error = worst_head(layer.attend(way), want)
                    checks.append(Check(f"error, {way}, {shape}, {name}", error, limit))
    title = f"remat_attention, one query over {tokens} tokens at {BITS} bits"
    return Table("operator", title, columns, rows, is_speed=True), checks


def worst_head(got: Tensor, want: Tensor) -> float:
    """Relative error of the head where it is greatest."""
    wanted = want.float()
    return float(((got.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


def gains(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """Shares of the time that absorbing leaves, from the rows of the operator's table."""
    return [
        Check(
            f"share of the time, {row['name']}, {row['shape']}, {row['dtype']}",
            1 / row["speedup"],
            1 / LEAST_GAIN,
        )
        for row in rows
        if row["name"] != next(iter(WAYS))
    ]


def count() -> tuple[Table, list[Check]]:
    """Count the operations of every way on every shape, and compare with the cost model."""
    columns = [
        Column("shape", "heads / KV heads / head dim"),
        Column("queries", "queries", "d"),
        Column("name", "way"),
        Column("flops", "remat_flops, MFLOP", ".2f"),
        Column("counted", "counted MFLOP", ".2f"),
        Column("ratio", "counted, of remat_flops", ".3f"),
    ]
    rows: list[dict[str, Any]] = []
    for shape in COUNTED_SHAPES:
        for queries in COUNTED_QUERIES:
            layer = Layer(shape, COUNTED_TOKENS, queries, torch.float32)
            for way in shape.ways:
                wanted, counted = layer.flops(way), layer.counted_flops(way)
                row: dict[str, Any] = {"shape": str(shape), "queries": queries, "name": way}
                row |= {"flops": wanted / 1e6, "counted": counted / 1e6}
                rows.append({**row, "ratio": counted / wanted})
    worst = max(abs(row["ratio"] - 1) for row in rows)
    title = f"Operations of the matrix products over {COUNTED_TOKENS} tokens"
    check = Check("error of remat_flops, worst shape and way", worst, COUNT_ERROR)
    return Table("flops", title, columns, rows), [check]
