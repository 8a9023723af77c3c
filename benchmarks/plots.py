"""Figures of the committed results, for the documentation; drawing them needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_kvq.cache.tier_map import TierMap

from . import llama_cpp
from .needle import DEPTHS
from .recipes import SAME
from .report import RESULTS, Report, Table

SIZE = (7, 4)
MODELS = {"recipes": "SmolLM2", "recipes-biased": "SmolLM2 with key biases"}
HEAT_MAP_COLUMNS = 4


def write(folder: Path) -> None:
    """Draw every figure into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        # Without the version of matplotlib, the same results give the same file.
        draw().savefig(folder / f"{name}.png", dpi=150, metadata={"Software": None})


def speed() -> Any:
    """Tokens per second against the context, the quartiles as bars."""
    figure, axes = _figure()
    for name, rows in _by_name(_table("generate", "decoding")).items():
        if name.startswith(llama_cpp.NAME):
            continue  # with other weights
        rates = [1e3 / row["median"] for row in rows]
        half = [
            rate * row["iqr"] / row["median"] / 2 for rate, row in zip(rates, rows, strict=True)
        ]
        axes.errorbar([row["context"] for row in rows], rates, half, marker="o", label=name)
    axes.set(
        ylim=(0, None),
        xlabel="tokens of context",
        ylabel="tokens per second",
        title="Decoding, SmolLM2-135M in float32, one thread",
    )
    axes.legend()
    return figure


def memory() -> Any:
    """Growth of a process against the tokens in its cache."""
    figure, axes = _figure()
    rows = [row for row in _table("memory", "growth").rows if row["calls"] == "the same tensors"]
    for name in dict.fromkeys(row["name"] for row in rows):
        points = [(row["tokens"], row["peak"]) for row in rows if row["name"] == name]
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set(
        ylim=(0, None),
        xlabel="tokens in the cache",
        ylabel="peak growth of the process, MiB",
        title="Memory of a process, a cache of SmolLM2-135M's shape in float32",
    )
    axes.legend()
    return figure


def accuracy() -> Any:
    """Divergence against bits per value, all caches with the same exact tokens."""
    figure, panels = _figure(columns=len(MODELS), size=(11, 5))
    for axes, (name, title) in zip(panels, MODELS.items(), strict=True):
        rows = [row for row in _table("quality", name).rows if row["exact"] == SAME.exact]
        ours = [row for row in rows if row["name"].startswith("KVQCache")]
        others = [row for row in rows if row not in ours]
        for points, style in ((ours, "o-"), (others, "s")):
            axes.errorbar(
                [row["bits"] for row in points],
                [row["mean"] for row in points],
                [row["mean_error"] for row in points],
                fmt=style,
            )
        for row in rows:
            _label(axes, row, is_ours=row in ours, rows=rows)
        axes.margins(x=0.38, y=0.1)
        axes.set(yscale="log", xlabel="bits per value, all metadata included", title=title)
    panels[0].set_ylabel("mean KL divergence, nats per token")
    return figure


def _label(axes: Any, row: dict[str, Any], is_ours: bool, rows: list[dict[str, Any]]) -> None:
    """Name a point: ours to the left, others to the right, above a lower one of the same bits."""
    is_lowest = row["mean"] == min(other["mean"] for other in rows if other["bits"] == row["bits"])
    axes.annotate(
        row["name"],
        (row["bits"], row["mean"]),
        xytext=(-6 if is_ours else 6, -8 if is_lowest else 4),
        textcoords="offset points",
        ha="right" if is_ours else "left",
        fontsize=7,
    )


def needle() -> Any:
    """Share of lookups that find their token, by length and depth, a panel for each cache."""
    by_name = _by_name(_table("needle", "plain-depths"))
    rows = -(-len(by_name) // HEAT_MAP_COLUMNS)
    figure, grid = _figure(rows, HEAT_MAP_COLUMNS, size=(11, 2.2 * rows))
    for axes, (name, lengths) in zip(grid.flat, by_name.items(), strict=False):
        shares = [[_or_blank(row[str(depth)]) for depth in range(DEPTHS)] for row in lengths]
        image = axes.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        axes.set_yticks(range(len(lengths)), [row["length"] for row in lengths])
        axes.set_xticks([0, DEPTHS - 1], ["start", "end"])
        axes.set_title(name, fontsize=9)
    for axes in grid.flat[len(by_name) :]:
        axes.set_axis_off()
    figure.colorbar(image, ax=grid, label="lookups that find their token")
    figure.supylabel("tokens of context")
    return figure


def tiers() -> Any:
    """Tiers of the tokens of a layer, by KV head, a panel for each time."""
    table = _table("tiered", "map")
    steps: dict[int, list[list[int]]] = {}
    for row in table.rows:
        steps.setdefault(row["step"], []).append([int(tier) for tier in row["tiers"]])
    figure, panels = _figure(rows=len(steps), size=(11, 2.5 * len(steps)))
    last = max(len(row["tiers"]) for row in table.rows)
    for axes, (step, heads) in zip(panels, steps.items(), strict=True):
        title = f"after {step} decoded tokens" if step else "after the prompt"
        TierMap(torch.tensor(heads)).plot(axes, title=title)
        # The legend is where the label would be.
        axes.set(xlim=(-0.5, last - 0.5), xlabel="")
    figure.suptitle(table.title)
    figure.supxlabel("token")
    return figure


def xquant() -> Any:
    """Milliseconds per token against the context with layer inputs, a panel for each model."""
    figure, panels = _figure(columns=2, size=(13, 6))
    for axes, kind in zip(panels, ("mha", "gqa"), strict=True):
        table = _table("xquant", f"decoding-{kind}")
        for name, rows in _by_name(table).items():
            points = [(row["context"], row["median"]) for row in rows]
            is_plain = name.endswith("absorb_value=False)")
            axes.plot(*zip(*points, strict=True), "--" if is_plain else "-", marker="o", label=name)
        axes.set_xscale("log", base=2)
        contexts = sorted({row["context"] for row in table.rows})
        axes.set_xticks(contexts, map(str, contexts))
        axes.set(yscale="log", xlabel="tokens of context", title=table.title)
        axes.title.set_fontsize(9)
    panels[0].set_ylabel("milliseconds per token")
    labels = panels[0].get_legend_handles_labels()
    figure.legend(*labels, loc="outside lower center", ncols=4, fontsize=8)
    return figure


FIGURES: dict[str, Callable[[], Any]] = {
    "speed": speed,
    "accuracy": accuracy,
    "memory": memory,
    "needle": needle,
    "tiers": tiers,
    "xquant": xquant,
}


def _figure(rows: int = 1, columns: int = 1, size: tuple[float, float] = SIZE) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns)


def _or_blank(share: float | None) -> float:
    """A share, or what is left white where there was nothing to look up."""
    return math.nan if share is None else share


def _table(benchmark: str, name: str) -> Table:
    report = Report.load(RESULTS / f"{benchmark}.json")
    return next(table for table in report.tables if table.name == name)


def _by_name(table: Table) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for row in table.rows:
        found.setdefault(row["name"], []).append(row)
    return found
