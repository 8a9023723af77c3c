"""What a cache of layer inputs does to a real model's predictions, and the bytes that it takes.

Two models are measured that compute the same: SmolLM2 as it is, whose query heads share keys and
values by threes, and SmolLM2 with a key and a value head for every query head, whose keys and
values take three times the bytes while its layer inputs stay what they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from torch_kvq import cross_layer_similarity

from .input_reader import EXACT, Reader, expanded, input_cache
from .recipes import PEERS
from .report import Check, Column, Table

LATENT_BITS = (4, 3, 2)
X_BITS = (8, 4, 3, 2)
CROSS_BITS = (4, 3, 2)
VARIANTS: tuple[dict[str, int], ...] = (
    {"accumulator_bits": 3},
    {"accumulator_bits": 8},
    {"first_layers": 1},
    {"first_layers": 6},
)
"""Options of the mode ``"cl"`` at the fewest bits, in the place of its own."""

APART = (1, 2, 4, 8)
"""Distances of the layers whose inputs are compared."""

SIMILARITY_TOKENS = 512

TARGETS = {
    "grouped": {input_cache(4, "latent"): 0.006},
    "expanded": {
        input_cache(4, "x"): 0.01,
        input_cache(3, "cl"): 0.01,
        input_cache(2, "cl"): 0.03,
    },
}
"""Greatest mean divergence by table and cache."""

SAME_MODEL = 1e-6
"""The same of the model with a KV head for every query head, with an uncompressed cache."""

COLUMNS = [
    Column("name", "cache"),
    Column("packed", "bytes per packed token", ".0f"),
    Column("bytes", "bytes per token in all", ".0f"),
    Column("ratio", "float16 is x times as large", ".2f"),
    Column("mean", "mean KL", ".5f"),
    Column("target", "target", ".2g"),
    Column("median", "median KL", ".5f"),
    Column("agreement", "same top token", ".1%"),
]
EQUAL_COLUMNS = [
    Column("name", "cache"),
    Column("bytes", "bytes per token in all", ".0f"),
    Column("mean", "mean KL", ".5f"),
    Column("x_mean", "mode 'x' at these bytes, interpolated", ".5f"),
    Column("ratio", "share of it", ".2f"),
]
AGAINST_COLUMNS = [
    Column("name", "cache of keys and values"),
    Column("bytes", "bytes per token in all", ".0f"),
    Column("mean", "mean KL", ".5f"),
    Column("smaller", "smallest cache of inputs that is as close"),
    Column("smaller_bytes", "bytes", ".0f"),
    Column("smaller_mean", "mean KL", ".5f"),
    Column("ratio", "x fewer bytes", ".2f"),
]
SIMILARITY_COLUMNS = [
    Column("name", "layers apart"),
    Column("mean", "mean cosine", ".3f"),
    Column("least", "least cosine", ".3f"),
    Column("difference", "norm of the difference, of the input's", ".2f"),
]


@torch.inference_mode()
def tables(model: Any, ids: Tensor, past: int) -> list[Table]:
    """Divergences and bytes on both models, what the cross-layer mode gains, and why.

    Args:
        model: a Llama without biases.
        ids: int64 ``[1, tokens]``. With a prompt and a text of 4 tokens more than a multiple of 64
            all caches pack the same tokens but the first 4.
        past: tokens that are the prompt; the others are decoded. Below about 64 of those, chance
            decides between caches of nearly the same divergence.
    """
    heads = expanded(model)
    reader = Reader.of(model, ids, past)
    grouped = [reader.input_row(bits, "latent") for bits in LATENT_BITS]
    grouped += [reader.packed_row(bits) for bits in LATENT_BITS]
    reader = reader.with_heads(heads)
    exact = reader.exact_row()
    x = [reader.input_row(bits, "x") for bits in X_BITS]
    cross = [reader.input_row(bits, "cl") for bits in CROSS_BITS]
    others = [reader.packed_row(bits) for bits in CROSS_BITS]
    others += [reader.recipe_row(recipe) for recipe in PEERS if recipe.name.startswith("KIVI")]
    variants = [reader.input_row(CROSS_BITS[-1], "cl", **options) for options in VARIANTS]
    title = "SmolLM2 with a KV head for every query head"
    return [
        divergences("grouped", "SmolLM2", grouped),
        divergences("expanded", title, [exact, *x, *cross, *others]),
        equal_bytes(x, cross),
        against(x + cross, others),
        divergences("variants", f"{title}, options of mode 'cl'", [cross[-1], *variants]),
        similarity(model, ids[:, :SIMILARITY_TOKENS]),
    ]


def divergences(name: str, model: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Caches by their bytes, with their targets."""
    targets = TARGETS.get(name, {})
    rows = [{**row, "target": targets.get(row["name"])} for row in rows]
    rows.sort(key=lambda row: row["bytes"])
    return Table(name, f"Divergence by bytes, {model}", COLUMNS, rows)


def equal_bytes(x: Sequence[dict[str, Any]], cross: Sequence[dict[str, Any]]) -> Table:
    """The cross-layer mode against plain inputs, between whose bytes the divergence is drawn.

    Args:
        x: rows of the mode ``"x"``.
        cross: rows of the mode ``"cl"``.
    """
    curve = [(row["bytes"], row["mean"]) for row in x]
    rows = []
    for row in cross:
        mean = interpolated(curve, row["bytes"])
        shown = {name: row[name] for name in ("name", "bytes", "mean")}
        rows.append({**shown, "x_mean": mean, "ratio": mean and row["mean"] / mean})
    return Table("equal", "Mode 'cl' against mode 'x' at equal bytes", EQUAL_COLUMNS, rows)


def interpolated(curve: Iterable[tuple[float, float]], at: float) -> float | None:
    """The value at a place between points, on straight lines between their logarithms.

    Args:
        curve: places and values.
        at: the place.

    Returns:
        None where ``at`` is outside of the points.

    Example:
        >>> interpolated([(10.0, 4.0), (20.0, 1.0)], 15.0)
        2.0
    """
    for (begin, first), (end, last) in pairwise(sorted(curve)):
        if begin <= at <= end:
            part = (at - begin) / (end - begin)
            return math.exp((1 - part) * math.log(first) + part * math.log(last))
    return None


def against(inputs: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> Table:
    """Caches of keys and values, and the smallest cache of layer inputs that is as close."""
    rows = []
    for row in sorted(others, key=lambda row: row["bytes"]):
        shown = {name: row[name] for name in ("name", "bytes", "mean")}
        close = [own for own in inputs if own["mean"] <= row["mean"]]
        if close:
            own = min(close, key=lambda own: own["bytes"])
            shown |= {
                "smaller": own["name"],
                "smaller_bytes": own["bytes"],
                "smaller_mean": own["mean"],
                "ratio": row["bytes"] / own["bytes"],
            }
        rows.append(shown)
    title = "Caches of keys and values against layer inputs, a KV head for every query head"
    return Table("against", title, AGAINST_COLUMNS, rows)


def similarity(model: Any, ids: Tensor) -> Table:
    """How alike the inputs of layers are."""
    found = cross_layer_similarity(model, ids)
    rows: list[dict[str, Any]] = []
    for apart in APART:
        cosines = found.cosine.diagonal(apart)
        if len(cosines):
            row = {"mean": float(cosines.mean()), "least": float(cosines.min())}
            rows.append({"name": str(apart), **row})
    rows[0]["difference"] = float(found.difference.mean())
    return Table("similarity", "Inputs of layers, SmolLM2", SIMILARITY_COLUMNS, rows)


def checks(found: Sequence[Table]) -> list[Check]:
    """Divergences, the model with more heads, and that ``"cl"`` is closer at equal bytes.

    Args:
        found: what `tables` gave.
    """
    rows = {table.name: {row["name"]: row for row in table.rows} for table in found}
    result = [
        Check(f"{table}: {name}", rows[table][name]["mean"], target)
        for table, targets in TARGETS.items()
        for name, target in targets.items()
    ]
    result.append(Check("expanded: the model", rows["expanded"][EXACT]["mean"], SAME_MODEL))
    for name in (input_cache(bits, "cl") for bits in CROSS_BITS):
        row = rows["equal"][name]
        ratio = math.nan if row["ratio"] is None else row["ratio"]
        result.append(Check(f"{name}, of mode 'x' at equal bytes", ratio, 1.0))
    return result
