"""What a decoding step costs beside its arithmetic: Python, dispatch and bindings; one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops.compare import BUDGET, head_error
from torch_kvq import KVQCache

from . import environment
from .generate import Decoding
from .model import filled, model_and_text, prefill
from .report import Check, Column, Report, Table
from .timing import Timing

BITS = 4
LAYERS = 30
HEADS, KV_HEADS, DIM = 9, 3, 64
"""The shape of SmolLM2-135M."""

PROMPT = 40
STEPS = 20
"""Steps that are timed, after `WARM_UP` more: so short a context that nothing is packed."""

WARM_UP = 2
"""The first compiles, and the second once more for every length."""

CAPACITY = 64
ROWS = (1, 5)

EAGER, COMPILED = "eager", "compiled"

COLUMNS = [
    Column("name", "cache"),
    Column("mode", "Python"),
    Column("median", "median us", ".1f"),
    Column("iqr", "IQR us", ".1f"),
    Column("minimum", "min us", ".1f"),
    Column("row", "each row us", ".1f"),
    Column("fixed", "fixed us", ".1f"),
    Column("token", "fixed, ms/token", ".2f"),
    Column("share", "of the model's step", ".1%"),
]


class Layers(torch.nn.Module):
    """The attention of all layers of a model, and nothing else of it.

    Args:
        layers: how many.
    """

    is_causal = True
    num_key_value_groups = HEADS // KV_HEADS

    def __init__(self, layers: int) -> None:
        from transformers import AttentionInterface

        super().__init__()
        self.layers = layers
        self.attention = AttentionInterface()["sdpa"]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Any, mask: Tensor | None
    ) -> Tensor:
        """Append to every layer and attend, each with the result of the one before as its query."""
        for index in range(self.layers):
            keys, values = cache.update(key, value, index)
            out, _ = self.attention(self, query, keys, values, mask, scaling=DIM**-0.5)
            query = out.transpose(1, 2)
        return query


@dataclass
class Contestant:
    """A cache in a loop of steps.

    Attributes:
        name: of the cache.
        mode: `EAGER` or `COMPILED`.
        make: an empty cache.
        is_static: the cache is allocated at once, so that every step has a mask.
        seconds: of the steps of a layer, for each number of rows.
        errors: of the last step, for each number of rows.
    """

    name: str
    mode: str
    make: Callable[[], Any]
    is_static: bool = False
    seconds: dict[int, list[float]] = field(default_factory=dict)
    errors: dict[int, float] = field(default_factory=dict)

    def run(self, layers: int, rows: int, forward: Callable[..., Tensor]) -> None:
        """Time the steps after a prompt, and compare the last with attention on all tokens."""
        key, value, query = inputs(rows)
        prompt = [(key[:, :, :PROMPT], value[:, :, :PROMPT])] * layers
        cache = filled(self.make(), prompt)
        steps = list(self._steps(key, value, query))
        for *tensors, mask in steps[:WARM_UP]:
            forward(*tensors, cache, mask)
        for *tensors, mask in steps[WARM_UP:]:
            start = time.perf_counter()
            out = forward(*tensors, cache, mask)
            self.seconds.setdefault(rows, []).append((time.perf_counter() - start) / layers)
        wanted = query[:, :, -1:]
        for _ in range(layers):
            wanted = F.scaled_dot_product_attention(wanted, key, value, enable_gqa=True)
        self.errors[rows] = head_error(out, wanted)

    def _steps(
        self, key: Tensor, value: Tensor, query: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
        for step in range(WARM_UP + STEPS):
            at = slice(PROMPT + step, PROMPT + step + 1)
            mask = torch.arange(CAPACITY)[None, None, None] < at.stop if self.is_static else None
            yield query[:, :, step : step + 1], key[:, :, at], value[:, :, at], mask


def inputs(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of the prompt and the steps, queries of the steps."""
    generator = torch.Generator().manual_seed(0)
    normal = partial(torch.randn, generator=generator)
    key, value = normal(2, rows, KV_HEADS, PROMPT + WARM_UP + STEPS, DIM)
    return key, value, normal(rows, HEADS, WARM_UP + STEPS, DIM)


@torch.no_grad()
def run(quick: bool = False) -> Report:
    """Time loops with each cache, eager and compiled, and report them if they are right."""
    torch.set_num_threads(1)
    layers, repeats = (4, 5) if quick else (LAYERS, 40)
    contestants = make_contestants(layers)
    module = Layers(layers)
    forwards: dict[str, Callable[..., Tensor]] = {
        EAGER: module,
        COMPILED: torch.compile(module, fullgraph=True),
    }
    with torch._dynamo.config.patch(recompile_limit=8 * len(contestants)):
        for _ in range(repeats):
            for each in contestants:
                for rows in ROWS:
                    each.run(layers, rows, forwards[each.mode])
    checks = [
        Check(f"{each.name}, {each.mode}, {rows} rows", each.errors[rows], BUDGET["exact"])
        for each in contestants
        for rows in ROWS
    ]
    step = model_seconds(1 if quick else 3)
    table = [row(each, step) for each in contestants]
    settings = {
        "a step": f"update and attention of a layer after {PROMPT} to {CAPACITY - 1} tokens, "
        f"{HEADS}/{KV_HEADS}/{DIM}, float32; the mean of {layers} layers",
        "each row": f"what a row adds to a step, from {ROWS[0]} and {ROWS[1]} rows",
        "fixed": "a step of one row less what a row adds: Python, dispatch, bindings and guards; "
        "both from minima",
        "fixed, ms/token": f"for {LAYERS} layers",
        "the model's step": f"SmolLM2-135M, float32, not compiled, {PROMPT} tokens, minimum: "
        f"{1e3 * step:.1f} ms",
        "repeats": f"{repeats} of {STEPS} steps, interleaved, a new cache for each",
    }
    tables = [Table("loop", "A step of a layer", COLUMNS, table, is_speed=True)]
    return Report("loop", environment.describe(), settings, checks, tables)


def make_contestants(layers: int) -> list[Contestant]:
    """Packed and uncompressed caches, growing and allocated at once."""
    from transformers import DynamicCache, LlamaConfig, StaticCache

    config = LlamaConfig(
        hidden_size=HEADS * DIM,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        num_hidden_layers=layers,
    )
    packed = partial(KVQCache, BITS, config=config)
    name = f"KVQCache(bits={BITS})"
    return [
        Contestant(name, EAGER, packed),
        Contestant("DynamicCache", EAGER, partial(DynamicCache, config=config)),
        Contestant(name, COMPILED, packed),
        Contestant("DynamicCache", COMPILED, partial(DynamicCache, config=config)),
        Contestant(f"{name}, static", COMPILED, partial(packed, max_cache_len=CAPACITY), True),
        Contestant(
            "StaticCache",
            COMPILED,
            partial(StaticCache, config=config, max_cache_len=CAPACITY),
            True,
        ),
    ]


def model_seconds(rounds: int) -> float:
    """The shortest step of the model at the same context, packed and without compiling."""
    model, ids = model_and_text(PROMPT + WARM_UP + STEPS)
    tokens, _ = prefill(model, ids[:, :PROMPT])
    decoding = Decoding()
    for _ in range(rounds):
        decoding.run_cache(model, filled(KVQCache(BITS), tokens), ids[:, PROMPT:])
    return min(decoding.seconds)


def row(contestant: Contestant, step: float) -> dict[str, Any]:
    """The figures of a contestant beside the duration of the model's step."""
    one, more = (Timing.of(contestant.seconds[rows]) for rows in ROWS)
    each = (more.minimum - one.minimum) / (ROWS[1] - ROWS[0])
    fixed = one.minimum - each
    return {
        "name": contestant.name,
        "mode": contestant.mode,
        "median": one.median,
        "iqr": one.iqr,
        "minimum": one.minimum,
        "row": each,
        "fixed": fixed,
        "token": LAYERS * fixed / 1e3,
        "share": LAYERS * fixed / (1e6 * step),
    }
