"""`torch_kvq.KVQCache` against the recipes that people would use instead, on several texts.

A cache rounds tokens every so often, not at every token, so the tokens between can be read in one
call: each finds the same rounded and exact tokens as if it had come alone. That is a tenth of the
time of decoding, for as many more tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from torch_kvq import KVQCache

from .model import filled
from .recipes import KIVI_WINDOW, PEERS, SAME, Recipe, Window
from .report import Column, Table
from .trial import TokenDivergence, Trial

CALLS = (1, 63)
"""Tokens of the calls, in turn; only the first of each 64 changes what is packed."""

KIVI_CALLS = (8,)
"""KIVI rounds one more value at each token: up to 7 more tokens stay exact here than there."""

BLOCK = 64
"""Tokens whose mean counts once in a standard error: neighbours depend on each other."""

BITS: tuple[int | str, ...] = (4, "4/3", 3, 2)

COLUMNS = [
    Column("name", "cache"),
    Column("bits", "bits per value", ".2f"),
    Column("exact", "exact tokens"),
    Column("mean", "mean KL", ".5f"),
    Column("mean_error", "±", ".5f"),
    Column("median", "median KL", ".5f"),
    Column("high", "99.9% KL", ".3f"),
    Column("agreement", "same top token", ".1%"),
    Column("perplexity", "perplexity", "+.2%"),
    Column("perplexity_error", "±", ".2%"),
]


@dataclass(frozen=True)
class Size:
    """How much is read.

    Attributes:
        texts: parts of the text, each read from its beginning.
        past: tokens of each that are read first. With the next one a tile is full.
        new: tokens of the continuation.
    """

    texts: int
    past: int
    new: int

    @property
    def tokens(self) -> int:
        """All tokens of all texts."""
        return self.texts * (self.past + self.new)

    def trials(self, model: Any, ids: Tensor) -> list[Trial]:
        """Read the texts."""
        parts = ids[:, : self.tokens].split(self.past + self.new, 1)
        return [Trial.read(model, part, self.past) for part in parts]


FULL = Size(texts=4, past=64 * 31 - 61, new=256)
QUICK = Size(texts=2, past=64 * 8 - 61, new=64)


@dataclass(frozen=True)
class Spread:
    """Predictions against those with the uncompressed cache, with their standard errors.

    Attributes:
        mean: mean divergence, in nats.
        mean_error: its standard error.
        median: median divergence.
        high: the divergence that one token in a thousand exceeds.
        agreement: share of tokens with the same most likely prediction.
        perplexity: relative change of the perplexity.
        perplexity_error: its standard error.
    """

    mean: float
    mean_error: float
    median: float
    high: float
    agreement: float
    perplexity: float
    perplexity_error: float

    @classmethod
    def of(cls, texts: Sequence[TokenDivergence]) -> Spread:
        """Statistics over all tokens of all texts."""
        divergence = torch.cat([text.divergence for text in texts])
        agrees = torch.cat([text.agrees for text in texts])
        change = torch.cat([text.loss_change for text in texts])
        ratio = float(change.mean().exp())
        return cls(
            float(divergence.mean()),
            standard_error([text.divergence for text in texts]),
            float(divergence.median()),
            float(divergence.quantile(0.999)),
            float(agrees.double().mean()),
            ratio - 1,
            ratio * standard_error([text.loss_change for text in texts]),
        )


def standard_error(texts: Sequence[Tensor]) -> float:
    """Standard error of the mean, from the means of blocks of neighbours."""
    means = torch.stack([block.mean() for text in texts for block in text.split(BLOCK)])
    return float(means.std()) / math.sqrt(len(means))


def table(name: str, title: str, trials: Sequence[Trial]) -> Table:
    """All caches on the same exact tokens, then the recipes on those of their own."""
    rows = [_packed_row(bits, trials) for bits in BITS]
    rows += [_recipe_row(recipe, SAME, trials) for recipe in PEERS]
    rows += [_recipe_row(recipe, recipe.window, trials) for recipe in PEERS]
    return Table(name, f"Divergence by recipe, {title}", COLUMNS, rows)


def summary(plain: Table, biased: Table) -> Table:
    """What the same exact tokens cost each cache, on both models."""
    columns = [
        *COLUMNS[:2],
        Column("mean", "mean KL", ".4f"),
        Column("agreement", "same top token", ".1%"),
        Column("biased_mean", "mean KL, key biases", ".4f"),
        Column("biased_agreement", "same top token, key biases", ".1%"),
    ]
    rows = [
        {**row, "biased_mean": other["mean"], "biased_agreement": other["agreement"]}
        for row, other in zip(plain.rows, biased.rows, strict=True)
        if row["exact"] == SAME.exact
    ]
    rows.sort(key=lambda row: -row["bits"])
    return Table("summary", "Divergence by recipe, the same exact tokens", columns, rows)


def _packed_row(bits: int | str, trials: Sequence[Trial]) -> dict[str, Any]:
    cache = filled(KVQCache(bits), trials[0].tokens)
    layout = cache.layers[0].state.layout
    stored = 8 * layout.bytes_per_token / (layout.key_dim + layout.value_dim)
    return _row(f"KVQCache({bits=})", stored, SAME.exact, trials, lambda: KVQCache(bits), CALLS)


def _recipe_row(recipe: Recipe, window: Window, trials: Sequence[Trial]) -> dict[str, Any]:
    calls = KIVI_CALLS if window is KIVI_WINDOW else CALLS
    return _row(recipe.name, recipe.bits, window.exact, trials, lambda: recipe.cache(window), calls)


def _row(
    name: str,
    bits: float,
    exact: str,
    trials: Sequence[Trial],
    make_cache: Callable[[], Any],
    calls: Sequence[int],
) -> dict[str, Any]:
    texts = [trial.by_token(make_cache(), call_sizes(trial, calls)) for trial in trials]
    return {"name": name, "bits": bits, "exact": exact, **asdict(Spread.of(texts))}


def call_sizes(trial: Trial, calls: Sequence[int]) -> list[int]:
    """The calls in turn, as many as read the whole continuation."""
    return list(calls) * (trial.ids.shape[1] // sum(calls))
