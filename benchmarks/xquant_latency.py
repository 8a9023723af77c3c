"""What a cache of layer inputs costs in whole models: tokens decoded, prompts, and packing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_kvq.formats import TILE_TOKENS

from .report import Check, Column, Table
from .timing import Timing
from .xquant_models import (
    EXACT,
    MODES,
    Shape,
    cache_bytes,
    empty_caches,
    fill,
    name_of,
    random_ids,
    with_options,
)

SHAPES = {"mha": Shape(9, 9, 4), "gqa": Shape(9, 3, 4)}
"""The second one is SmolLM2-135M's; both have fewer layers."""

WARM_UP = 1
"""Tokens of each run that are decoded before the clock starts."""

ABSORBED = 1e-3
"""Relative difference of logits where values are absorbed, by rounding alone."""

COLUMNS = [
    Column("context", "tokens of context", "d"),
    Column("name", "cache"),
    Column("median", "median ms/token", ".1f"),
    Column("iqr", "IQR ms", ".1f"),
    Column("minimum", "min ms", ".1f"),
    Column("slower", "times as long as DynamicCache", ".2f"),
    Column("mebibytes", "cache MiB", ".2f"),
    Column("smaller", "times smaller", ".2f"),
]


@dataclass
class Decoding:
    """What decoding with one cache gave, over all of its runs.

    Attributes:
        cache: holds the context.
        absorb: whether values are absorbed; None for another kind of cache.
        seconds: of each token.
        logits: of the last run, ``[tokens, vocabulary]``.
    """

    cache: Any
    absorb: bool | None = None
    seconds: list[float] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    def run(self, model: Any, ids: Tensor) -> None:
        """Decode given tokens, ``int64[1, tokens]``, and remove them from the cache again."""
        if self.absorb is not None:
            with_options(self.cache, absorb_value=self.absorb)
        logits = []
        for position, token in enumerate(ids.split(1, 1)):
            start = time.perf_counter()
            logits.append(model(token, past_key_values=self.cache).logits[0])
            if position >= WARM_UP:
                self.seconds.append(time.perf_counter() - start)
        self.logits = torch.cat(logits)
        self.cache.crop(-ids.shape[1])


def decode(key: str, contexts: Sequence[int], steps: int, rounds: int) -> tuple[Table, list[Check]]:
    """Decode after each context with all caches in turn.

    Args:
        key: one of `SHAPES`.
        contexts: tokens before those that are decoded.
        steps: tokens of a run.
        rounds: runs of each cache.
    """
    shape = SHAPES[key]
    model = shape.model(intermediate=shape.channels)
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    for context in contexts:
        ids = random_ids(context + WARM_UP + steps)
        decodings = contestants(model, ids[:, :context])
        for _ in range(rounds):
            for decoding in decodings.values():
                decoding.run(model, ids[:, context:])
        rows += decoding_rows(context, decodings)
        checks += gate(decodings)
    title = f"Decoding, a Llama of {shape} with random weights in float32"
    return Table(f"decoding-{key}", title, COLUMNS, rows, is_speed=True), checks


def contestants(model: Any, ids: Tensor) -> dict[str, Decoding]:
    """All caches with a context, those of layer inputs in both ways."""
    found = {}
    for name, make in empty_caches(model).items():
        cache = fill(model, make(), ids)
        mode = next((mode for mode in MODES if name == name_of(mode)), None)
        if mode is None:
            found[name] = Decoding(cache)
        else:
            found |= {name_of(mode, way): Decoding(cache, way) for way in (True, False)}
    return found


def gate(decodings: dict[str, Decoding]) -> list[Check]:
    """Whether layer inputs were attended to while packed, and both ways gave the same."""
    checks = []
    for mode in MODES:
        absorbed, plain = (decodings[name_of(mode, way)] for way in (True, False))
        error = (absorbed.logits - plain.logits).norm() / plain.logits.norm()
        checks += [
            Check(f"logits, values absorbed, {mode!r}", float(error), ABSORBED),
            Check(f"layers decoded, {mode!r}", absorbed.cache.materialized, 0),
        ]
    return checks


def decoding_rows(context: int, decodings: dict[str, Decoding]) -> list[dict[str, Any]]:
    """A row for each cache."""
    times = {name: Timing.of(decoding.seconds) for name, decoding in decodings.items()}
    exact_bytes = cache_bytes(decodings[EXACT].cache)
    rows = []
    for name, decoding in decodings.items():
        size = cache_bytes(decoding.cache)
        rows.append(
            {
                "context": context,
                "name": name,
                "median": times[name].median / 1e3,
                "iqr": times[name].iqr / 1e3,
                "minimum": times[name].minimum / 1e3,
                "slower": times[name].median / times[EXACT].median,
                "mebibytes": size / 2**20,
                "smaller": exact_bytes / size,
            }
        )
    return rows


def store(tokens: int, rounds: int) -> Table:
    """Read a prompt with all caches in turn, and pack the tokens of a page.

    Args:
        tokens: of the prompt.
        rounds: prompts for each cache.
    """
    columns = [
        Column("shape", "model"),
        Column("name", "cache"),
        Column("rate", "prompt tokens/s", ".0f"),
        Column("iqr", "IQR of the prompt, ms", ".0f"),
        Column("share", "of DynamicCache's", ".0%"),
        Column("packing", "packing, us per token", ".1f"),
    ]
    rows: list[dict[str, Any]] = []
    for shape in SHAPES.values():
        model = shape.model(intermediate=shape.channels)
        makers = empty_caches(model)
        prompts: dict[str, list[float]] = {name: [] for name in makers}
        packing: dict[str, list[float]] = {name: [] for name in makers}
        for _ in range(rounds):
            for name, make in makers.items():
                cache = make()
                start = time.perf_counter()
                model(random_ids(tokens), past_key_values=cache, logits_to_keep=1)
                prompts[name].append(time.perf_counter() - start)
                if name in map(name_of, MODES):
                    packing[name].append(page_seconds(cache))
        rows += storing_rows(shape, tokens, prompts, packing)
    title = f"Storing: prompts of {tokens} tokens, float32"
    return Table("storing", title, columns, rows, is_speed=True)


def page_seconds(cache: Any) -> float:
    """How long all layers take to pack 64 tokens that are due."""
    held = cache.packed_layers[-1].state.recent[0].shape[1]
    with_options(cache, residual_length=held - TILE_TOKENS)
    start = time.perf_counter()
    cache.flush()
    return time.perf_counter() - start


def storing_rows(
    shape: Shape,
    tokens: int,
    prompts: dict[str, list[float]],
    packing: dict[str, list[float]],
) -> list[dict[str, Any]]:
    """A row for each cache, from seconds of prompts and of pages."""
    times = {name: Timing.of(seconds) for name, seconds in prompts.items()}
    return [
        {
            "shape": str(shape),
            "name": name,
            "rate": 1e6 * tokens / found.median,
            "iqr": found.iqr / 1e3,
            "share": times[EXACT].median / found.median,
            "packing": Timing.of(packing[name]).median / TILE_TOKENS if packing[name] else None,
        }
        for name, found in times.items()
    ]
