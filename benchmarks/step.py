"""One decoding step of one layer: what a call costs beside its data."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import Case, make_query, make_tokens
from tests.ops.compare import BUDGET, head_error
from torch_kvq import KVQLayer, reference

from .report import Check, Column, Table
from .timing import Contestant, Timing, interleaved

BITS = 4
PROMPT = 300
STEPS = 40
SHAPES = ((9, 3, 64), (32, 8, 128))
"""Query heads, KV heads, head dim."""

SHORT = (64, 128, 256)
"""Tokens of which none is packed."""

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Appends a key and a value and attends with a query."""


def make_case(shape: tuple[int, int, int]) -> Case:
    """The tokens of a layer and as many queries as steps."""
    heads, kv_heads, dim = shape
    return Case(
        f"step-{dim}",
        bits=(BITS, BITS),
        key_dim=dim,
        value_dim=dim,
        heads=heads,
        kv_heads=kv_heads,
        steps=(PROMPT, *(1,) * STEPS),
        queries=STEPS,
    )


def packed_layer(case: Case, key: Tensor, value: Tensor) -> tuple[KVQLayer, Step]:
    """A layer with a prompt, and its step."""
    layer = KVQLayer(BITS)
    layer.update(key, value)
    layer.flush()

    def step(key: Tensor, value: Tensor, query: Tensor) -> Tensor:
        layer.update(key, value)
        return layer.attend(query)

    return layer, step


def dynamic_layer(case: Case, key: Tensor, value: Tensor) -> tuple[Any, Step]:
    """A layer of Transformers with a prompt, and its step with PyTorch's attention."""
    from transformers.cache_utils import DynamicLayer

    layer = DynamicLayer()
    layer.update(key, value)

    def step(key: Tensor, value: Tensor, query: Tensor) -> Tensor:
        keys, values = layer.update(key, value)
        return F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)

    return layer, step


CONTESTANTS = {
    f"KVQLayer(bits={BITS}), update and attend": packed_layer,
    "DynamicLayer and SDPA": dynamic_layer,
}


def gate() -> list[Check]:
    """Error of a layer's last step against the reference on its state."""
    checks = []
    for shape in SHAPES:
        case = make_case(shape)
        prompt, steps = inputs(case)
        layer, step = packed_layer(case, *prompt)
        for arguments in steps:
            out = step(*arguments)
        assert layer.state is not None
        wanted, _ = reference.lut_attention(
            steps[-1][2], *layer.state.tensors, key_bits=BITS, value_bits=BITS
        )
        error = head_error(out, wanted)
        checks.append(Check(f"a layer's step, {title(shape)}", error, BUDGET["exact"]))
    return checks


def inputs(case: Case) -> tuple[tuple[Tensor, Tensor], list[tuple[Tensor, Tensor, Tensor]]]:
    """Keys and values of the prompt; key, value and query of each step."""
    key, value = make_tokens(case)
    new = [x[:, :, PROMPT:].split(1, 2) for x in (key, value)]
    queries = make_query(case).split(1, 2)
    return (key[:, :, :PROMPT], value[:, :, :PROMPT]), list(zip(*new, queries, strict=True))


def measure(repeats: int) -> Table:
    """Time the steps, a new layer for each repeat, the contestants in turn."""
    columns = [
        Column("name", f"a step of a layer, {PROMPT} to {PROMPT + STEPS} tokens"),
        Column("shape", "heads"),
        Column("median", "median us", ".1f"),
        Column("iqr", "IQR us", ".1f"),
        Column("minimum", "min us", ".1f"),
    ]
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        case = make_case(shape)
        prompt, steps = inputs(case)
        makers = {name: partial(make, case, *prompt) for name, make in CONTESTANTS.items()}
        seconds: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(2 * repeats):
            for name, make in makers.items():
                seconds[name].append(mean_seconds(make()[1], steps))
        for name, values in seconds.items():
            found = Timing.of(values)
            row = {"name": name, "shape": title(shape), "median": found.median, "iqr": found.iqr}
            rows.append({**row, "minimum": found.minimum})
    return Table("step", "One step of one layer", columns, rows, is_speed=True)


def measure_short(repeats: int) -> Table:
    """Time attention over few tokens, which a layer holds exact, against PyTorch's."""
    columns = [
        Column("shape", "heads"),
        Column("tokens", "tokens", "d"),
        Column("layer", "KVQLayer, attend us", ".1f"),
        Column("layer_iqr", "IQR us", ".1f"),
        Column("sdpa", "SDPA us", ".1f"),
        Column("sdpa_iqr", "IQR us", ".1f"),
        Column("speedup", "x of SDPA", ".2f"),
    ]
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for tokens in SHORT:
            heads, kv_heads, dim = shape
            key, value = torch.randn(2, 1, kv_heads, tokens, dim)
            query = torch.randn(1, heads, 1, dim)
            layer = KVQLayer(BITS)
            layer.update(key, value)
            layer.flush()
            sdpa = partial(F.scaled_dot_product_attention, query, key, value, enable_gqa=True)
            calls = {"layer": partial(layer.attend, query), "sdpa": sdpa}
            times = interleaved([Contestant(name, [call]) for name, call in calls.items()], repeats)
            row: dict[str, Any] = {"shape": title(shape), "tokens": tokens}
            for name, found in times.items():
                row |= {name: found.median, f"{name}_iqr": found.iqr}
            rows.append({**row, "speedup": row["sdpa"] / row["layer"]})
    return Table("short", "Attention over few tokens", columns, rows, is_speed=True)


def mean_seconds(step: Step, steps: list[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Mean duration of all steps."""
    start = time.perf_counter()
    for arguments in steps:
        step(*arguments)
    return (time.perf_counter() - start) / len(steps)


def title(shape: tuple[int, int, int]) -> str:
    """A shape as the reports name it."""
    return "/".join(map(str, shape))
