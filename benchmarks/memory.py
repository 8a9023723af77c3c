"""What a process grows by when a cache fills, against the bytes that the cache reports.

Each cache is filled in a process of its own: from keys and values that stay where they are, so that
nothing but the cache grows, and from new tensors for each call, as a model makes them. What the
process then grows by in addition is what the C library keeps of the freed ones.
"""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_kvq import KVQCache

from . import environment
from .report import Check, Column, Report, Table

TOKENS = (2048, 8192)
CHUNK = 512
"""Tokens of a call while the prompt is read."""

STEPS = 64
"""The last tokens come one by one."""

LAYERS, HEADS, KV_HEADS, DIM = 30, 9, 3, 64
"""The shape of SmolLM2-135M."""

CALLS = ("the same tensors", "new tensors")
"""Where the keys and values of a call are."""

LIMIT = 0.05
_STATUS = Path("/proc/self/status")

COLUMNS = [
    Column("tokens", "tokens", "d"),
    Column("name", "cache"),
    Column("calls", "keys and values of a call"),
    Column("held", "tensors MiB", ".2f"),
    Column("growth", "resident growth MiB", ".2f"),
    Column("deviation", "off by", "+.1%"),
    Column("peak", "peak growth MiB", ".2f"),
    Column("peak_deviation", "off by", "+.1%"),
]


def run(quick: bool = False) -> Report:
    """Fill each cache in a process of its own."""
    if not _STATUS.exists():
        raise SystemExit(f"the memory benchmark reads {_STATUS}, which this system has not")
    torch.set_num_threads(1)
    rows = [
        measure(name, tokens, calls)
        for tokens in TOKENS[: 1 if quick else None]
        for name in CACHES
        for calls in CALLS
    ]
    checks = [
        Check(
            f"peak growth, {row['name']}, {row['tokens']} tokens",
            abs(row["peak_deviation"]),
            LIMIT,
        )
        for row in rows
        if row["name"] != "DynamicCache" and row["calls"] == CALLS[0]
    ]
    settings = {
        "model": f"{LAYERS} layers, {HEADS} query heads, {KV_HEADS} KV heads, head dim {DIM}, "
        "float32, as SmolLM2-135M",
        "tokens": f"calls of {CHUNK}, all layers in turn; the last {STEPS} one by one",
        "growth": "resident set after the last token minus that before the first, after a warm-up "
        "with a small cache",
        "allocator": "the C library's, as it is",
    }
    table = Table("growth", "Memory of a process", COLUMNS, rows)
    return Report("memory", environment.describe(), settings, checks, [table])


def measure(name: str, tokens: int, calls: str) -> dict[str, Any]:
    """Fill a cache in a new process."""
    command = (sys.executable, "-m", __spec__.name, name, str(tokens), calls)
    result = subprocess.run(
        command,
        cwd=environment.ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = json.loads(result.stdout)
    return {
        "tokens": tokens,
        "name": name,
        "calls": calls,
        **{key: size / 2**20 for key, size in found.items()},
        "deviation": found["growth"] / found["held"] - 1,
        "peak_deviation": found["peak"] / found["held"] - 1,
    }


class PackedCache:
    """A `KVQCache` with the attention of its layers."""

    def __init__(self, bits: int) -> None:
        self.cache = KVQCache(bits)

    def step(self, layer: int, key: Tensor, value: Tensor, query: Tensor) -> None:
        """Store the tokens of a layer and attend with one query."""
        self.cache.update(key, value, layer)
        self.cache.layers[layer].attend(query)

    def held(self) -> int:
        """Bytes that the cache reports."""
        return self.cache.memory_report().total_bytes


class UncompressedCache:
    """A `DynamicCache` with PyTorch's attention."""

    def __init__(self) -> None:
        from transformers import DynamicCache

        self.cache = DynamicCache()

    def step(self, layer: int, key: Tensor, value: Tensor, query: Tensor) -> None:
        """Store the tokens of a layer and attend with one query."""
        F.scaled_dot_product_attention(
            query, *self.cache.update(key, value, layer), enable_gqa=True
        )

    def held(self) -> int:
        """Bytes of its tensors."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers)


CACHES: dict[str, Callable[[], Any]] = {
    "DynamicCache": UncompressedCache,
    "KVQCache(bits=4)": lambda: PackedCache(4),
    "KVQCache(bits=2)": lambda: PackedCache(2),
}


@torch.inference_mode()
def fill(make: Callable[[], Any], tokens: int, calls: str) -> dict[str, int]:
    """Bytes by which this process grows, now and at most, and those that the cache holds."""
    torch.set_num_threads(1)
    query = torch.randn(1, HEADS, 1, DIM)
    new = torch.randn(2, 1, KV_HEADS, CHUNK, DIM)
    is_new = calls == CALLS[1]
    _feed(make(), query, new, CHUNK, is_new)
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    cache = make()
    _feed(cache, query, new, tokens, is_new)
    gc.collect()
    return {
        "held": cache.held(),
        "growth": _status("VmRSS") - before,
        "peak": _status("VmHWM") - before,
    }


def _feed(cache: Any, query: Tensor, new: Tensor, tokens: int, is_new: bool) -> None:
    prompt = tokens - STEPS
    calls = [CHUNK] * (prompt // CHUNK) + [prompt % CHUNK] * (prompt % CHUNK > 0) + [1] * STEPS
    for count in calls:
        for layer in range(LAYERS):
            key, value = new[:, :, :, :count].clone() if is_new else new[:, :, :, :count]
            cache.step(layer, key, value, query)


def _status(name: str) -> int:
    """Bytes of a line of the process's status."""
    match = re.search(rf"^{name}:\s*(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


if __name__ == "__main__":
    print(json.dumps(fill(CACHES[sys.argv[1]], int(sys.argv[2]), sys.argv[3])))
