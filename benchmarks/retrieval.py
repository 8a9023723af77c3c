"""Facts that nothing attended to: found by the exact cache, blurred far away, found again.

Every layer and KV head holds random keys, and values of which 64, the facts, are planted: a fact is
the key and the value of one token in one head. The values of all facts are alike, so that a coarse
code confuses them. Queries follow a topic of their head, as queries of a text do, and the prompt's
never ask for a fact. Then each fact is asked for by a few queries near its key, and the answer
counts when the output of the last one is nearest to the right value among all 64. No model is in
it: the right answers are known, and the exact cache finds them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_kvq import formats
from torch_kvq.cache.tiered_cache import TieredCache

from .registry import sdpa
from .report import Check, Column, Table

LAYERS, KV_HEADS, GROUP, DIM = 2, 4, 2, 64
FACTS = 64
QUESTION = 8
"""Queries that ask for a fact in turn: in the cooldown of 5 steps its head may take no token."""

SHARPNESS = 4.0
"""Standard deviation of the scores of a question; that of its fact is sqrt(DIM) times as large."""

TOPICS = {"peaked": 4.0, "flat": 2.0}
"""The same of the part of other queries that stays: whether few tokens have most of the weight."""

OFF_TOPIC = 0.4
"""The same of the part that changes."""

QUERY_NOISE = 0.2
"""Of a question, against the key it asks for."""

DIFFERENCE = 0.03
"""Of the values of two facts, against what they have in common."""

SETTING = (
    f"{LAYERS} layers of {KV_HEADS} KV heads, dim {DIM}, {FACTS} facts among random tokens, "
    f"each asked for by {QUESTION} queries; standard deviation of the other queries' scores "
    + " or ".join(f"{topic} ({name})" for name, topic in TOPICS.items())
)

PROMOTION: tuple[dict[str, Any], ...] = (
    {"promote": False},
    {"promote": "sync", "margin": 0.0},
    {"promote": "sync"},
)
"""Options of the caches."""

LEAST_LOSS = 0.1
"""Share of the facts that the far tier alone must lose, or the task would show nothing."""

MOST_PROMOTED = 0.05

COLUMNS = [
    Column("name", "cache"),
    Column("found", f"facts found, of {FACTS}", "d"),
    Column("promoted", "tokens that came back", "d"),
    Column("rate", "of steps x layers x KV heads", ".1%"),
    Column("share", "of the far tokens", ".2%"),
]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``(layer, query, key, value)``: append the keys and values, and attend to all."""


@dataclass(frozen=True)
class Task:
    """A context with facts, and the questions.

    Attributes:
        key: ``[layers, 1, kv_heads, tokens + steps, dim]``.
        value: the same for values.
        queries: ``[layers, 1, heads, tokens + steps, dim]``.
        tokens: of the context; the steps follow.
        places: int64 ``[facts, 3]``, layer, KV head and token of each.
    """

    key: Tensor
    value: Tensor
    queries: Tensor
    tokens: int
    places: Tensor

    @classmethod
    def make(cls, tokens: int, topic: str, seed: int = 0) -> Task:
        """Plant the facts at random tokens of the context, the heads in turn.

        Args:
            tokens: of the context.
            topic: one of `TOPICS`.
            seed: of all that is random.
        """
        generator = torch.Generator().manual_seed(seed)
        total = tokens + FACTS * QUESTION

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        key, value = normal(2, LAYERS, 1, KV_HEADS, total, DIM)
        fact = torch.arange(FACTS)
        # Neither sinks nor recent tokens, which are near whatever is asked.
        token = torch.randperm(tokens - 128, generator=generator)[:FACTS] + 32
        places = torch.stack((fact % LAYERS, fact // LAYERS % KV_HEADS, token), 1)
        value[places[:, 0], 0, places[:, 1], token] = normal(DIM) + DIFFERENCE * normal(FACTS, DIM)
        heads = KV_HEADS * GROUP
        queries = TOPICS[topic] * normal(LAYERS, 1, heads, 1, DIM)
        queries = queries + OFF_TOPIC * normal(LAYERS, 1, heads, total, DIM)
        for number, (layer, head, place) in enumerate(places.tolist()):
            asked = key[layer, 0, head, place] + QUERY_NOISE * normal(GROUP, QUESTION, DIM)
            steps = slice(tokens + number * QUESTION, tokens + (number + 1) * QUESTION)
            queries[layer, 0, head * GROUP : (head + 1) * GROUP, steps] = SHARPNESS * asked
        return cls(key, value, queries, tokens, places)

    @property
    def values(self) -> Tensor:
        """The right answers, ``[facts, dim]``."""
        layer, head, token = self.places.T
        return self.value[layer, 0, head, token]

    def found(self, attend: Attend) -> int:
        """Facts that a cache finds, read from its outputs of the last query of each question."""
        right = 0
        self._step(attend, slice(0, self.tokens))
        for number, (layer, head, _) in enumerate(self.places.tolist()):
            first = self.tokens + number * QUESTION
            for place in range(first, first + QUESTION):
                outputs = self._step(attend, slice(place, place + 1))
            answer = outputs[layer][0, head * GROUP : (head + 1) * GROUP, -1].mean(0)
            right += int((self.values - answer).norm(dim=1).argmin()) == number
        return right

    def _step(self, attend: Attend, part: slice) -> list[Tensor]:
        return [
            attend(
                layer,
                self.queries[layer, :, :, part],
                self.key[layer, :, :, part],
                self.value[layer, :, :, part],
            )
            for layer in range(LAYERS)
        ]


def exact(task: Task) -> Attend:
    """All tokens as they are; the context is only stored."""
    ends = [0] * LAYERS

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        ends[layer] += key.shape[2]
        held = slice(0, ends[layer])
        return sdpa(query[:, :, -1:], task.key[layer, :, :, held], task.value[layer, :, :, held])

    return attend


def tiered(cache: TieredCache) -> Attend:
    """The layers of a cache."""

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache.update(key, value, layer)
        out: Tensor = cache.layers[layer].attend(query, is_causal=True)
        return out

    return attend


def table(tokens: int, topic: str) -> Table:
    """What the exact cache and both far formats find, with every way of promotion."""
    task = Task.make(tokens, topic)
    rows: list[dict[str, Any]] = [{"name": "exact", "found": task.found(exact(task))}]
    for far in formats.FAR_FORMATS:
        rows += [row(task, far, **options) for options in PROMOTION]
    title = f"Retrieval: {FACTS} facts in {tokens} tokens, {topic} attention"
    return Table(f"retrieval-{topic}", title, COLUMNS, rows)


def row(task: Task, far: str, **options: Any) -> dict[str, Any]:
    """What one cache finds, and how many tokens come back for it."""
    cache = TieredCache(far=far, **options)
    found = task.found(tiered(cache))
    far_tokens = sum(int((cache.tier_map(layer).tiers == 0).sum()) for layer in range(LAYERS))
    promoted = cache.promoted
    cache.close()
    return {
        "name": cache_name(far, options),
        "promotes": bool(options["promote"]),
        "found": found,
        "promoted": promoted,
        "rate": promoted / (FACTS * QUESTION * LAYERS * KV_HEADS),
        "share": promoted / (far_tokens + promoted),
    }


def cache_name(far: str, options: dict[str, Any]) -> str:
    """A `TieredCache` with its arguments."""
    given = {"far": far, **options}
    return f"TieredCache({', '.join(f'{name}={value!r}' for name, value in given.items())})"


def checks(found: Table) -> list[Check]:
    """That promotion finds what the exact cache finds, sparingly, and that it takes promotion."""
    exact_score, *others = found.rows
    result = [Check("facts that the exact cache loses", FACTS - exact_score["found"], 0)]
    for item in others:
        if item["promotes"]:
            lost = exact_score["found"] - item["found"]
            result += [
                Check(f"facts lost, {item['name']}", lost, 1),
                Check(f"promotions, {item['name']}", item["rate"], MOST_PROMOTED),
            ]
        else:
            share = item["found"] / exact_score["found"]
            result.append(Check(f"share of facts found, {item['name']}", share, 1 - LEAST_LOSS))
    return result
