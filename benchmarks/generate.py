"""Decoding speed of a real model, one thread: packed against what people would use instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torch_kvq import KVQCache

from . import environment, llama_cpp, peers
from .model import Tokens, filled, model_and_text, prefill
from .quality import TARGETS
from .report import Check, Column, Report, Table
from .timing import Timing
from .trial import Divergence

CONTEXTS = (128, 2048, 4096, 8100)
QUICK_CONTEXTS = (128, 512)
BITS = 4
WARM_UP = 2
"""Tokens of each run that are decoded before the clock starts."""

QUALITY_ALLOWANCE = 2.0
"""A few tokens scatter more than the many of the quality benchmark."""

EXACT, PACKED = "DynamicCache", f"KVQCache(bits={BITS})"

LLAMA_CPP_LIMITS = {"f16": 0.02, "q8_0": 0.02, "q4_0": 0.25}
"""Mean KL of llama.cpp: with float16 from this model with the exact cache, whose weights are the
same and whose activations are not rounded; with the others from its own with float16."""

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

    def run(self, step: Callable[[Tensor], Tensor], ids: Tensor) -> None:
        """Decode given tokens.

        Args:
            step: a token ``int64[1, 1]`` to the logits that follow it, ``[1, vocabulary]``.
            ids: the tokens, ``int64[1, tokens]``.
        """
        logits = []
        for position, token in enumerate(ids.split(1, 1)):
            start = time.perf_counter()
            output = step(token)
            if position >= WARM_UP:
                self.seconds.append(time.perf_counter() - start)
            logits.append(output)
        self.logits = torch.cat(logits)

    def run_cache(self, model: Any, cache: Any, ids: Tensor) -> None:
        """Decode with a cache that holds what precedes the tokens."""
        self.run(lambda token: model(token, past_key_values=cache).logits[0], ids)
        self.cache_bytes = cache_bytes(cache)
        self.materialized = getattr(cache, "materialized", 0)

    def run_session(self, session: llama_cpp.Session, ids: Tensor) -> None:
        """Decode with llama.cpp, which has read what precedes the tokens."""
        length = session.length
        self.run(session.step, ids)
        self.cache_bytes = session.bytes
        session.rewind(length)


@dataclass(frozen=True)
class Prompt:
    """A text that was read, and its continuation.

    Attributes:
        tokens: keys and values of what was read.
        ids: the continuation, ``int64[1, tokens]``.
        sessions: of llama.cpp, which have read the same.
    """

    tokens: Tokens
    ids: Tensor
    sessions: Mapping[str, llama_cpp.Session]

    @classmethod
    def read(
        cls, model: Any, ids: Tensor, steps: int, sessions: Mapping[str, llama_cpp.Session]
    ) -> Prompt:
        """Read all of a text but the last ``steps`` tokens."""
        context = ids[:, :-steps]
        for session in sessions.values():
            session.read(context)
        return cls(prefill(model, context, chunk=1024)[0], ids[:, -steps:], sessions)


@torch.inference_mode()
def run(quick: bool = False) -> Report:
    """Decode with all caches, and report how fast if the predictions are right."""
    torch.set_num_threads(1)
    lengths, steps, rounds = (QUICK_CONTEXTS, 8, 1) if quick else (CONTEXTS, 24, 3)
    model, ids = model_and_text(max(lengths) + steps)
    sessions = llama_cpp.sessions(max(lengths) + steps)
    shortest = min(lengths)
    short = Prompt.read(
        model, ids[:, : shortest + steps], steps, llama_cpp.sessions(shortest + steps)
    )
    checks, rows = [], []
    for length in lengths:
        prompts = [short]
        if length > shortest:
            prompts.append(Prompt.read(model, ids[:, : length + steps], steps, sessions))
        decodings = decode(model, prompts, rounds)
        targets = prompts[-1].ids[0, 1:]
        divergences = _divergences(decodings[-1], targets, references(list(sessions)))
        checks += _checks(length, decodings[-1][PACKED], divergences)
        rows += _rows(length, decodings, divergences)
    title = "Decoding, SmolLM2-135M in float32 unless named"
    settings = {
        "model": "SmolLM2-135M-Instruct, float32, attention of Transformers: sdpa",
        "repeats": f"{rounds} runs of {steps - WARM_UP} tokens, one call each, the caches in turn",
        llama_cpp.NAME: llama_cpp.describe(),
    }
    tables = [
        Table("decoding", title, COLUMNS, rows, is_speed=True),
        depth_table(rows, model.config.num_hidden_layers * model.config.num_key_value_heads),
    ]
    return Report("generate", environment.describe(), settings, checks, tables)


def decode(model: Any, prompts: Sequence[Prompt], rounds: int) -> list[dict[str, Decoding]]:
    """Decode the continuation of each prompt with all caches and with llama.cpp.

    No two caches are in memory at once: a cache that allocates anew for each token, as DynamicCache
    does, becomes several times slower when something else allocates in between. Those of llama.cpp
    are allocated before and stay.
    """
    makers = _empty_caches(model.config)
    found = [{name: Decoding() for name in (*makers, *prompt.sessions)} for prompt in prompts]
    for _ in range(rounds):
        for prompt, decodings in zip(prompts, found, strict=True):
            for name, make in makers.items():
                decodings[name].run_cache(model, filled(make(), prompt.tokens), prompt.ids)
            for name, session in prompt.sessions.items():
                decodings[name].run_session(session, prompt.ids)
    return found


def _empty_caches(config: Any) -> dict[str, Callable[[], Any]]:
    from transformers import DynamicCache

    return {EXACT: DynamicCache, PACKED: lambda: KVQCache(BITS), **peers.peer_caches(config)}


def references(sessions: Sequence[str]) -> dict[str, str]:
    """Whose predictions those of each session are compared with.

    That is this model with the exact cache for the first one, and the first one, which computes
    with the same weights, for the others.
    """
    return {name: sessions[0] if index else EXACT for index, name in enumerate(sessions)}


def _divergences(
    decodings: dict[str, Decoding], targets: Tensor, references: dict[str, str]
) -> dict[str, float]:
    """Mean divergence of each cache's predictions from those of the exact one, or of another."""
    return {
        name: Divergence.of(
            decoding.logits, decodings[references.get(name, EXACT)].logits, targets
        ).mean
        for name, decoding in decodings.items()
    }


def _checks(length: int, packed: Decoding, divergences: dict[str, float]) -> list[Check]:
    """Whether what was timed was right, and packed throughout."""
    limits = {PACKED: QUALITY_ALLOWANCE * TARGETS[BITS]}
    for name in divergences:
        if name.startswith(llama_cpp.NAME):
            limits[name] = LLAMA_CPP_LIMITS[name.split()[-1]]
    return [
        Check(f"layers decoded at {length} tokens", packed.materialized, 0),
        *(
            Check(f"mean KL at {length} tokens, {name}", divergences[name], limit)
            for name, limit in limits.items()
        ),
    ]


def cache_bytes(cache: Any) -> int:
    """Bytes that a cache holds."""
    if isinstance(cache, KVQCache):
        return cache.memory_report().total_bytes
    return peers.held_bytes(cache)


def _rows(
    length: int, found: Sequence[dict[str, Decoding]], divergences: dict[str, float]
) -> list[dict[str, Any]]:
    """A row for each cache after the last prompt, with its times after the first one."""
    decodings = found[-1]
    times, short = (
        {name: Timing.of(decoding.seconds) for name, decoding in each.items()}
        for each in (decodings, found[0])
    )
    return [
        {
            "context": length,
            "name": name,
            "median": times[name].median / 1e3,
            "iqr": times[name].iqr / 1e3,
            "minimum": times[name].minimum / 1e3,
            "short_median": short[name].median / 1e3,
            "short_minimum": short[name].minimum / 1e3,
            "speedup": times[EXACT].median / times[name].median,
            "mebibytes": decoding.cache_bytes / 2**20,
            "divergence": divergences[name],
            "smaller": decodings[EXACT].cache_bytes / decoding.cache_bytes,
        }
        for name, decoding in decodings.items()
    ]


def depth_table(rows: list[dict[str, Any]], heads: int) -> Table:
    """What a token takes longer after a long context than after the shortest, in the same rounds.

    That is attention, and the cache's own work: the rest of the model does not depend on the depth.

    Args:
        rows: those of the decoding table.
        heads: KV heads of all layers.
    """
    shortest = min(row["context"] for row in rows)
    columns = [
        *COLUMNS[:2],
        Column("more", "median ms more", ".2f"),
        Column("minimum_more", "min ms more", ".2f"),
        Column("per_token", "ns per token, KV head", ".1f"),
        Column("speedup", f"x of {EXACT}", ".2f"),
    ]
    found: list[dict[str, Any]] = []
    exact = 0.0
    for row in rows:
        context, name = row["context"], row["name"]
        if context == shortest:
            continue
        more = row["median"] - row["short_median"]
        exact = more if name == EXACT else exact
        found.append(
            {
                "context": context,
                "name": name,
                "more": more,
                "minimum_more": row["minimum"] - row["short_minimum"],
                "per_token": 1e6 * more / (heads * (context - shortest)),
                "speedup": exact / more if min(exact, more) > 0 else None,
            }
        )
    title = f"Decoding, ms per token more than after {shortest} tokens"
    return Table("depth", title, columns, found, is_speed=True)
