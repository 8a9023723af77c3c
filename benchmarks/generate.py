"""Decoding speed of a real model, one thread: packed against Transformers' own cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_kvq import KVQCache

from . import environment, timing
from .model import Tokens, continuation, filled, model_and_text, prefill
from .quality import TARGETS, Divergence
from .report import Check, Column, Report, Table
from .timing import Contestant, Timing

CONTEXTS = (128, 2048, 8100)
BITS = 4
QUALITY_ALLOWANCE = 2.0
"""A few tokens scatter more than the many of the quality benchmark."""

COLUMNS = [
    Column("context", "tokens of context", "d"),
    Column("name", "cache"),
    Column("median", "median ms/token", ".1f"),
    Column("iqr", "IQR ms", ".1f"),
    Column("minimum", "min ms", ".1f"),
    Column("speedup", "x of DynamicCache", ".2f"),
    Column("mebibytes", "cache MiB", ".1f"),
    Column("smaller", "times smaller", ".2f"),
]


@dataclass(frozen=True)
class Context:
    """A text that was read, and the tokens that follow.

    Attributes:
        tokens: keys and values of what was read.
        ids: the tokens that follow, ``int64[1, tokens]``.
    """

    tokens: Tokens
    ids: Tensor

    @property
    def length(self) -> int:
        """Tokens read."""
        return self.tokens[0][0].shape[2]

    def caches(self) -> dict[str, Any]:
        """The contestants, holding what was read."""
        from transformers import DynamicCache

        empty = {"DynamicCache": DynamicCache(), f"KVQCache(bits={BITS})": KVQCache(BITS)}
        return {name: filled(cache, self.tokens) for name, cache in empty.items()}


@torch.inference_mode()
def run(quick: bool = False) -> Report:
    """Check the predictions of both caches, then time them, token by token in turn."""
    lengths, steps = (CONTEXTS[:2], 8) if quick else (CONTEXTS, 32)
    model, ids = model_and_text(max(lengths) + steps)
    contexts = [_read(model, ids, length, steps) for length in lengths]
    torch.set_num_threads(1)
    checks = [check for context in contexts for check in gate(model, context)]
    tables: list[Table] = []
    if all(check.passed for check in checks):
        rows = [row for context in contexts for row in measure(model, context)]
        title = "Decoding, SmolLM2-135M in float32"
        tables = [Table("decoding", title, COLUMNS, rows, is_speed=True)]
    settings = {
        "model": "SmolLM2-135M-Instruct, float32, attention of Transformers: sdpa",
        "repeats": f"{steps} tokens of a given text, one call each, the caches in turn",
    }
    return Report("generate", environment.describe(), settings, checks, tables)


def _read(model: Any, ids: Tensor, length: int, steps: int) -> Context:
    tokens, _ = prefill(model, ids[:, :length], chunk=1024)
    return Context(tokens, ids[:, length : length + steps])


def gate(model: Any, context: Context) -> list[Check]:
    """The predictions that are about to be timed, and whether they were made packed."""
    exact, packed = context.caches().values()
    exact_logits, logits = (continuation(model, cache, context.ids) for cache in (exact, packed))
    divergence = Divergence.of(logits, exact_logits, context.ids[0, 1:])
    limit = QUALITY_ALLOWANCE * TARGETS[BITS]
    return [
        Check(f"mean KL at {context.length} tokens", divergence.mean, limit),
        Check(f"layers decoded at {context.length} tokens", packed.materialized, 0),
    ]


def measure(model: Any, context: Context) -> list[dict[str, Any]]:
    """Time both caches on one context."""
    caches = context.caches()
    sizes = {name: cache_bytes(cache) for name, cache in caches.items()}
    contestants = [
        Contestant(name, [_decoder(model, cache, context.ids)]) for name, cache in caches.items()
    ]
    times = timing.interleaved(contestants, context.ids.shape[1] - 1)
    first = next(iter(caches))
    return [
        _row(context, name, times[name], times[first], sizes[name], sizes[first]) for name in caches
    ]


def _decoder(model: Any, cache: Any, ids: Tensor) -> Any:
    """A call that decodes the next token each time."""
    parts = iter(ids.split(1, 1))
    return lambda: model(next(parts), past_key_values=cache)


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds."""
    if isinstance(cache, KVQCache):
        return cache.memory_report().total_bytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _row(
    context: Context, name: str, time: Timing, yardstick: Timing, size: int, plain_size: int
) -> dict[str, Any]:
    return {
        "context": context.length,
        "name": name,
        "median": time.median / 1e3,
        "iqr": time.iqr / 1e3,
        "minimum": time.minimum / 1e3,
        "speedup": yardstick.median / time.median,
        "mebibytes": size / 2**20,
        "smaller": plain_size / size,
    }
