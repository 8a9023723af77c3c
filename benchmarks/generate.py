"""Decoding speed of a real model, one thread: packed against Transformers' own caches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_kvq import KVQCache

from . import environment, peers
from .model import filled, model_and_text, prefill
from .quality import TARGETS
from .report import Check, Column, Report, Table
from .timing import Timing
from .trial import Divergence

CONTEXTS = (128, 2048, 8100)
BITS = 4
WARM_UP = 2
"""Tokens of each run that are decoded before the clock starts."""

QUALITY_ALLOWANCE = 2.0
"""A few tokens scatter more than the many of the quality benchmark."""

EXACT, PACKED = "DynamicCache", f"KVQCache(bits={BITS})"

COLUMNS = [
    Column("context", "tokens of context", "d"),
    Column("name", "cache"),
    Column("median", "median ms/token", ".1f"),
    Column("iqr", "IQR ms", ".1f"),
    Column("minimum", "min ms", ".1f"),
    Column("speedup", "x of DynamicCache", ".2f"),
    Column("mebibytes", "cache MiB", ".1f"),
    Column("smaller", "times smaller", ".2f"),
    Column("divergence", "mean KL", ".4f"),
]


@dataclass
class Decoding:
    """What decoding with one cache gave, over all of its runs.

    Attributes:
        seconds: of each token.
        logits: of the last run, ``[tokens, vocabulary]``.
        cache_bytes: what the cache held at last.
        materialized: how often it had to be decoded for attention.
    """

    seconds: list[float] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    cache_bytes: int = 0
    materialized: int = 0

    def run(self, model: Any, cache: Any, ids: Tensor) -> None:
        """Decode given tokens with a cache that holds what precedes them."""
        logits = []
        for position, token in enumerate(ids.split(1, 1)):
            start = time.perf_counter()
            output = model(token, past_key_values=cache)
            if position >= WARM_UP:
                self.seconds.append(time.perf_counter() - start)
            logits.append(output.logits[0])
        self.logits = torch.cat(logits)
        self.cache_bytes = cache_bytes(cache)
        self.materialized = getattr(cache, "materialized", 0)


@torch.inference_mode()
def run(quick: bool = False) -> Report:
    """Decode with both caches, and report how fast if the predictions are right."""
    torch.set_num_threads(1)
    lengths, steps, rounds = (CONTEXTS[:2], 8, 1) if quick else (CONTEXTS, 24, 3)
    model, ids = model_and_text(max(lengths) + steps)
    checks, rows = [], []
    for length in lengths:
        rest = ids[:, length : length + steps]
        decodings = decode(model, ids[:, :length], rest, rounds)
        divergences = _divergences(decodings, rest[0, 1:])
        checks += _checks(length, decodings[PACKED], divergences[PACKED])
        rows += _rows(length, decodings, divergences)
    title = "Decoding, SmolLM2-135M in float32"
    settings = {
        "model": "SmolLM2-135M-Instruct, float32, attention of Transformers: sdpa",
        "repeats": f"{rounds} runs of {steps - WARM_UP} tokens, one call each, the caches in turn",
    }
    tables = [Table("decoding", title, COLUMNS, rows, is_speed=True)]
    return Report("generate", environment.describe(), settings, checks, tables)


def decode(model: Any, context: Tensor, ids: Tensor, rounds: int) -> dict[str, Decoding]:
    """Decode the same tokens with all caches.

    No two caches are in memory at once: a cache that allocates anew for each token, as DynamicCache
    does, becomes several times slower when something else allocates in between.
    """
    tokens, _ = prefill(model, context, chunk=1024)
    makers = _empty_caches(model.config)
    decodings = {name: Decoding() for name in makers}
    for _ in range(rounds):
        for name, decoding in decodings.items():
            decoding.run(model, filled(makers[name](), tokens), ids)
    return decodings


def _empty_caches(config: Any) -> dict[str, Callable[[], Any]]:
    from transformers import DynamicCache

    return {EXACT: DynamicCache, PACKED: lambda: KVQCache(BITS), **peers.peer_caches(config)}


def _divergences(decodings: dict[str, Decoding], targets: Tensor) -> dict[str, float]:
    """Mean divergence of each cache's predictions from those of the exact one."""
    exact = decodings[EXACT].logits
    return {
        name: Divergence.of(decoding.logits, exact, targets).mean
        for name, decoding in decodings.items()
    }


def _checks(length: int, packed: Decoding, divergence: float) -> list[Check]:
    """Whether what was timed was right, and packed throughout."""
    limit = QUALITY_ALLOWANCE * TARGETS[BITS]
    return [
        Check(f"mean KL at {length} tokens", divergence, limit),
        Check(f"layers decoded at {length} tokens", packed.materialized, 0),
    ]


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds."""
    if isinstance(cache, KVQCache):
        return cache.memory_report().total_bytes
    return peers.held_bytes(cache)


def _rows(
    length: int, decodings: dict[str, Decoding], divergences: dict[str, float]
) -> list[dict[str, Any]]:
    times = {name: Timing.of(decoding.seconds) for name, decoding in decodings.items()}
    return [
        {
            "context": length,
            "name": name,
            "median": times[name].median / 1e3,
            "iqr": times[name].iqr / 1e3,
            "minimum": times[name].minimum / 1e3,
            "speedup": times[EXACT].median / times[name].median,
            "mebibytes": decoding.cache_bytes / 2**20,
            "divergence": divergences[name],
            "smaller": decodings[EXACT].cache_bytes / decoding.cache_bytes,
        }
        for name, decoding in decodings.items()
    ]
