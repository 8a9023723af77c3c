"""What a packed cache does to the predictions of a real model.

The model reads a text once, exactly, as it does with every cache, and then a given continuation
token by token: the caches differ in nothing but how they hold what was read. The figure to watch is
the Kullback-Leibler divergence of the predictions from those with the uncompressed cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torch_kvq import KVQCache

from . import environment
from .model import (
    Tokens,
    biased_keys,
    continuation,
    filled,
    loss,
    model_and_text,
    prefill,
)
from .recipes import plain_rotation_cache
from .report import Check, Column, Report, Table

TARGETS: dict[int | str, float] = {4: 0.0035, "4/3": 0.0055, 3: 0.014, 2: 0.12}
"""Greatest mean divergence of each preset."""

BIASED_ALLOWANCE = 1.5
"""By how much a model with a large key bias may exceed the targets."""

PASS_THROUGH_TARGET = 1e-6
PERPLEXITY_TARGET = 0.02
"""Greatest change of perplexity by the bias alone: with it the model must stay as good."""


@dataclass(frozen=True)
class Divergence:
    """Predictions against those with the uncompressed cache.

    Attributes:
        mean: mean divergence, in nats.
        median: median divergence.
        agreement: share of tokens with the same most likely prediction.
        perplexity: relative change of the perplexity.
    """

    mean: float
    median: float
    agreement: float
    perplexity: float

    @classmethod
    def of(cls, logits: Tensor, exact: Tensor, targets: Tensor) -> Divergence:
        """Compare predictions.

        Args:
            logits: ``[tokens, vocabulary]``.
            exact: the same with the uncompressed cache.
            targets: ``[tokens - 1]``, what followed all tokens but the last.
        """
        wanted, got = (x.double().log_softmax(-1) for x in (exact, logits))
        divergence = (wanted.exp() * (wanted - got)).sum(-1)
        change = loss(got[:-1], targets).mean() - loss(wanted[:-1], targets).mean()
        return cls(
            float(divergence.mean()),
            float(divergence.median()),
            float((wanted.argmax(-1) == got.argmax(-1)).float().mean()),
            float(change.exp() - 1),
        )


@dataclass(frozen=True)
class Trial:
    """A text that a model has read, and its exact continuation.

    Attributes:
        model: the model.
        tokens: keys and values of what was read.
        ids: the continuation, ``int64[1, tokens]``.
        exact: its logits with the uncompressed cache.
        losses: of the tokens that were read.
    """

    model: Any
    tokens: Tokens
    ids: Tensor
    exact: Tensor
    losses: Tensor

    @classmethod
    def read(cls, model: Any, ids: Tensor, past: int) -> Trial:
        """Read ``past`` tokens; the rest is the continuation."""
        from transformers import DynamicCache

        tokens, losses = prefill(model, ids[:, :past])
        rest = ids[:, past:]
        exact = continuation(model, filled(DynamicCache(), tokens), rest, rest.shape[1])
        return cls(model, tokens, rest, exact, losses)

    @property
    def perplexity(self) -> float:
        """Perplexity of what was read and of the continuation."""
        rest = loss(self.exact[:-1], self.ids[0, 1:])
        return float(torch.cat((self.losses, rest)).mean().exp())

    def divergence(self, cache: Any, step: int = 1) -> Divergence:
        """What an empty cache does to the continuation, in calls of ``step`` tokens."""
        logits = continuation(self.model, filled(cache, self.tokens), self.ids, step)
        return Divergence.of(logits, self.exact, self.ids[0, 1:])


COLUMNS = [
    Column("name", "cache"),
    Column("stored_bits", "bits in a tile", ".2f"),
    Column("all_bits", "bits in all", ".2f"),
    Column("mean", "mean KL", ".5f"),
    Column("target", "target", ".2g"),
    Column("verdict", ""),
    Column("median", "median KL", ".5f"),
    Column("agreement", "same top token", ".1%"),
    Column("perplexity", "perplexity", "+.2%"),
    Column("chunk_mean", "mean KL, one call", ".5f"),
]


@torch.inference_mode()
def run(quick: bool = False) -> Report:
    """All presets on the model as it is, and with a large bias on its keys."""
    torch.set_num_threads(1)
    past, new = (512, 16) if quick else (1920, 128)
    model, ids = model_and_text(past + new)
    plain = Trial.read(model, ids, past)
    tables = [table("plain", "SmolLM2", plain, 1.0)]
    with biased_keys(model):
        biased = Trial.read(model, ids, past)
        title = "SmolLM2 with key biases of norm 300"
        tables.append(table("biased", title, biased, BIASED_ALLOWANCE))
    tables.append(_perplexities(plain, biased))
    settings = {
        "model": "SmolLM2-135M-Instruct, float32",
        "text": f"{past} tokens of Python's documentation, read exactly, then {new} more",
    }
    checks = [check for item in tables for check in _checks(item)]
    return Report("quality", environment.describe(), settings, checks, tables)


def table(name: str, title: str, trial: Trial, allowance: float) -> Table:
    """All caches on one trial."""
    targets = {16: PASS_THROUGH_TARGET, **{bits: TARGETS[bits] * allowance for bits in TARGETS}}
    rows = [packed_row(trial, bits, target) for bits, target in targets.items()]
    for bits in (4, 2):
        make_cache = functools.partial(plain_rotation_cache, bits)
        rows.append(_row(f"plain rotation, {bits} bits", trial, make_cache))
    return Table(name, f"Divergence, {title}", COLUMNS, rows)


def packed_row(trial: Trial, bits: int | str, target: float) -> dict[str, Any]:
    """A preset of `KVQCache` on one trial."""
    row = _row(f"KVQCache({bits=})", trial, lambda: KVQCache(bits))
    cache = filled(KVQCache(bits), trial.tokens)
    layout, report = cache.layers[0].state.layout, cache.memory_report()
    row["stored_bits"] = 8 * layout.bytes_per_token / (layout.key_dim + layout.value_dim)
    row["all_bits"] = 16 * report.total_bytes / report.fp16_bytes
    row["target"] = target
    return {**row, "verdict": _check(row).verdict}


def _row(name: str, trial: Trial, make_cache: Callable[[], Any]) -> dict[str, Any]:
    in_one_call = trial.divergence(make_cache(), trial.ids.shape[1])
    return {
        "name": name,
        **asdict(trial.divergence(make_cache())),
        "chunk_mean": in_one_call.mean,
    }


def _perplexities(plain: Trial, biased: Trial) -> Table:
    columns = [
        Column("name", "model"),
        Column("perplexity", "perplexity", ".3f"),
        Column("mean", "change", ".2%"),
        Column("target", "target", ".0%"),
    ]
    change = abs(biased.perplexity / plain.perplexity - 1)
    rows = [
        {"name": "SmolLM2", "perplexity": plain.perplexity},
        {
            "name": "with key biases",
            "perplexity": biased.perplexity,
            "mean": change,
            "target": PERPLEXITY_TARGET,
        },
    ]
    return Table("perplexity", "Perplexity of the uncompressed models", columns, rows)


def _check(row: dict[str, Any]) -> Check:
    """Whether a row keeps its target, token by token and in one call."""
    return Check(row["name"], max(row["mean"], row.get("chunk_mean", 0.0)), row["target"])


def _checks(item: Table) -> list[Check]:
    checks = [_check(row) for row in item.rows if "target" in row]
    return [replace(check, name=f"{item.name}: {check.name}") for check in checks]
