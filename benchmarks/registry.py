"""The benchmarks and the baselines by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from . import yardstick
from .report import Report

BENCHMARKS: dict[str, str] = {
    "quality": "what packing does to the predictions of a real model",
    "needle": "whether lookups in a long text find the same token",
    "attention": "one attention call over packed tokens against PyTorch's",
    "tiered": "near and far tokens: accuracy, bytes, retrieval and one attention call",
    "xquant": "layer inputs in the place of keys and values: accuracy, bytes and latency",
    "encode": "storing tokens: appended one by one, and as a prompt",
    "loop": "what a decoding step costs beside its arithmetic, eager and compiled",
    "memory": "what a process grows by against what the cache reports",
    "generate": "decoding with a real model against Transformers' DynamicCache",
    "weights": "decoding with int8 weights, compiled",
}
"""A module of this package for each, with a function ``run``, and what it measures, in order."""


def run(name: str, quick: bool = False) -> Report:
    """Run a benchmark.

    Args:
        name: one of `BENCHMARKS`.
        quick: fewer settings and repeats, to see that everything works.
    """
    module = importlib.import_module(f"{__package__}.{name}")
    report: Report = module.run(quick)
    return report


@dataclass(frozen=True)
class Baseline:
    """Attention of one query over uncompressed keys and values.

    Attributes:
        name: what the report calls it.
        dtype: of query, keys and values.
        attend: ``(query, key, value)`` to the output; query ``[1, heads, 1, dim]``, keys and
            values ``[1, kv_heads, tokens, dim]``.
        tolerance: relative error of the worst head that its dtype explains.
    """

    name: str
    dtype: torch.dtype
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    tolerance: float


def sdpa(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """PyTorch's own attention."""
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def folded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Two batched matrix products in which the queries of a KV head are rows."""
    batch, heads, _, dim = query.shape
    kv_heads = key.shape[1]
    rows = query.view(batch * kv_heads, heads // kv_heads, dim)
    scores = torch.bmm(rows * dim**-0.5, key.flatten(0, 1).mT)
    return torch.bmm(scores.softmax(-1), value.flatten(0, 1)).view(batch, heads, 1, -1)


YARDSTICK = "SDPA float32"
"""The baseline that speed is given in multiples of."""

PLAIN_KERNEL = "own fp16 kernel"
"""The baseline that tells what compression alone gains: a plain kernel without it."""

BASELINES = (
    Baseline(YARDSTICK, torch.float32, sdpa, 1e-4),
    Baseline("SDPA bfloat16", torch.bfloat16, sdpa, 3e-2),
    Baseline("SDPA float16", torch.float16, sdpa, 1e-2),
    Baseline("folded bmm float32", torch.float32, folded, 1e-4),
    Baseline("folded bmm bfloat16", torch.bfloat16, folded, 3e-2),
    Baseline(PLAIN_KERNEL, torch.float16, yardstick.attend, 1e-2),
)


def available_baselines() -> list[Baseline]:
    """The baselines without those that this machine cannot compile."""
    return [item for item in BASELINES if item.name != PLAIN_KERNEL or not yardstick.missing()]
