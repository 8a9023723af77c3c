"""What a packed cache does to the predictions of a real model.

The model reads a text once, exactly, as it does with every cache, and then a given continuation
token by token: the caches differ in nothing but how they hold what was read. The figure to watch is
the Kullback-Leibler divergence of the predictions from those with the uncompressed cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from torch_kvq import KVQCache

from . import comparison, environment
from .model import biased_keys, filled, model_and_text
from .recipes import plain_rotation_cache
from .report import Check, Column, Report, Table
from .trial import Trial

TARGETS: dict[int | str, float] = {4: 0.0035, "4/3": 0.0055, 3: 0.014, 2: 0.12}
"""Greatest mean divergence of each preset."""

BIASED_ALLOWANCE = 1.5
"""By how much a model with a large key bias may exceed the targets."""

PASS_THROUGH_TARGET = 1e-6
PERPLEXITY_TARGET = 0.02
"""Greatest change of perplexity by the bias alone: with it the model must stay as good."""


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
    size = comparison.QUICK if quick else comparison.FULL
    model, ids = model_and_text(max(past + new, size.tokens))
    plain = Trial.read(model, ids[:, : past + new], past)
    tables = [
        table("plain", "SmolLM2", plain, 1.0),
        comparison.table("recipes", "SmolLM2", size.trials(model, ids)),
    ]
    with biased_keys(model):
        biased = Trial.read(model, ids[:, : past + new], past)
        title = "SmolLM2 with key biases of norm 300"
        tables += [
            table("biased", title, biased, BIASED_ALLOWANCE),
            comparison.table("recipes-biased", title, size.trials(model, ids)),
        ]
    tables += [comparison.summary(tables[1], tables[3]), _perplexities(plain, biased)]
    settings = {
        "model": "SmolLM2-135M-Instruct, float32",
        "text": f"{past} tokens of Python's documentation, read exactly, then {new} more",
        "texts of the recipes": f"{size.texts} parts of it, {size.past} tokens read exactly, then "
        f"{size.new} more; standard errors from the means of {comparison.BLOCK} tokens",
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
