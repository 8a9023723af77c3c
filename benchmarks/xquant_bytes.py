"""Bytes of caches of layer inputs: by the formula, and in caches that are filled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_kvq import XQuantCache

from .report import Check, Column, Table
from .xquant_models import Shape, fill, random_ids

LAYERS = 30
MHA = Shape(4, 4, LAYERS, dtype=torch.bfloat16)
GQA = Shape(6, 2, LAYERS, dtype=torch.bfloat16)
INTERMEDIATE = 64

BEYOND = 0.01
"""What a filled cache may take beyond the formula and its exact tokens."""


@dataclass(frozen=True)
class Setting:
    """A cache and what it has to reach.

    Attributes:
        shape: of the model.
        mode: of the cache.
        bits: of the cache.
        least: how many times the bytes of a token in pages have to go into those in fp16.
    """

    shape: Shape
    mode: str
    bits: int
    least: float

    @property
    def name(self) -> str:
        """What the table calls it."""
        return f"XQuantCache({self.bits}, mode={self.mode!r})"


SETTINGS = (
    Setting(MHA, "x", 4, 7.4),
    Setting(MHA, "cl", 3, 9.0),
    Setting(MHA, "cl", 2, 12.0),
    Setting(GQA, "latent", 4, 3.7),
    Setting(GQA, "latent", 3, 4.8),
    Setting(GQA, "latent", 2, 6.9),
)
"""Factors of the paper, less what a position and a page number take."""


def measure(tokens: int, settings: Sequence[Setting] = SETTINGS) -> tuple[Table, list[Check]]:
    """Fill a cache of each setting and ask it for its bytes.

    Args:
        tokens: of the prompt.
        settings: caches.
    """
    columns = [
        Column("shape", "model"),
        Column("name", "cache"),
        Column("per_token", "bytes per token in pages", ".0f"),
        Column("fp16", "fp16 K and V", ".0f"),
        Column("factor", "times smaller", ".2f"),
        Column("mebibytes", f"after {tokens} tokens, MiB", ".2f"),
        Column("window", "of it exact tokens, MiB", ".2f"),
        Column("window_tokens", "room for exact tokens", "d"),
        Column("filled_factor", "times smaller than fp16", ".2f"),
    ]
    rows, checks = [], []
    models: dict[Shape, Any] = {}
    for setting in settings:
        if setting.shape not in models:
            models = {setting.shape: setting.shape.model(INTERMEDIATE)}
        model = models[setting.shape]
        cache = fill(
            model, XQuantCache(setting.bits, mode=setting.mode, model=model), random_ids(tokens)
        )
        rows.append(row := bytes_row(setting, cache))
        name = f"{setting.name}, {setting.shape}"
        checks += [
            Check(f"bytes of fp16's, {name}", 1 / row["factor"], 1 / setting.least),
            Check(f"bytes beyond formula and exact tokens, {name}", row["beyond"], BEYOND),
        ]
    return Table("bytes", "Bytes of caches of bfloat16 models", columns, rows), checks


def bytes_row(setting: Setting, cache: Any) -> dict[str, Any]:
    """Bytes by the formula and in the cache."""
    report = cache.memory_report()
    per_token, fp16 = cache.bytes_per_token[setting.mode], cache.bytes_per_token["fp16"]
    state = cache.packed_layers[-1].state
    window = report.parts["exact"]
    expected = per_token * state.quantized + window
    return {
        "shape": str(setting.shape),
        "name": setting.name,
        "per_token": per_token,
        "fp16": fp16,
        "factor": fp16 / per_token,
        "mebibytes": report.total_bytes / 2**20,
        "window": window / 2**20,
        "window_tokens": state.tails[0].shape[1],
        "filled_factor": report.fp16_bytes / report.total_bytes,
        "beyond": report.total_bytes / expected - 1,
    }
