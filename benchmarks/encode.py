"""What storing tokens costs: one by one, as a prompt, and as a step of a layer; one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torch_kvq
from tests.cases import Case, State, append_steps, empty_state, make_tokens
from torch_kvq import KVQCache, formats, reference

from . import environment, step, timing
from .model import Tokens, filled, model_and_text
from .report import Check, Column, Report, Table
from .timing import Contestant, Timing

BITS = (4, 3, 2)
DIMS = (128, 64)
HEADS = 8
PROMPT = 4096
"""Tokens of the calls that store many, and those that precede a token stored alone."""

STEPS = 4 * formats.TILE_TOKENS
"""Tokens stored one by one, so that every one of them bears its share of the tiles."""

PREFILL = 2048

COLUMNS = [
    Column("name", "store, ns per token and KV head"),
    Column("append", "one by one", ".0f"),
    Column("append_iqr", "IQR", ".0f"),
    Column("prompt", f"{PROMPT} at once", ".0f"),
    Column("prompt_iqr", "IQR", ".0f"),
    Column("tile", "quantize_tile", ".0f"),
    Column("tile_iqr", "IQR", ".0f"),
]


@torch.inference_mode()
def run(quick: bool = False) -> Report:
    """Check the records and a layer's step, then time them."""
    torch.set_num_threads(1)
    cases = [make_case(dim, bits) for dim in DIMS for bits in BITS]
    checks = [check for case in cases for check in gate(case)] + step.gate()
    repeats = 3 if quick else 15
    tables: list[Table] = []
    if all(check.passed for check in checks):
        rows = [row for case in cases for row in measure(case, repeats)]
        tables = [
            Table("storing", "Storing tokens, K and V together", COLUMNS, rows, is_speed=True),
            step.measure(repeats),
            step.measure_short(2 * repeats),
            prefill_share(512 if quick else PREFILL, 1 if quick else 3),
        ]
    settings = {
        "data": f"{HEADS} KV heads, one row, float32; random keys with uneven channels",
        "one by one": f"{STEPS} calls of quantize_tile_ after {PROMPT} tokens, their mean",
        "repeats": f"{repeats}, interleaved",
    }
    return Report("encode", environment.describe(), settings, checks, tables)


def make_case(dim: int, bits: int) -> Case:
    """A layer with a prompt and the tokens after it."""
    return Case(
        f"encode-{dim}",
        bits=(bits, bits),
        key_dim=dim,
        value_dim=dim,
        kv_heads=HEADS,
        steps=(PROMPT,) + (1,) * STEPS,
    )


def gate(case: Case) -> list[Check]:
    """Bytes in which records and state of each tier differ from the reference's."""
    few = Case(f"{case.id}-few", case.bits, case.key_dim, case.value_dim, steps=(320, *(1,) * 70))
    wanted = appended(few, reference.quantize_tile_)
    key, value = tiled(make_tokens(few), 5)
    balance = torch_kvq.key_balance(key[:1])
    records = reference.quantize_tile(key, value, balance, *case.bits)
    checks = []
    for tier in torch_kvq.cpu_capabilities().available:
        with torch_kvq.cpu_capability(tier):
            state = appended(few, torch.ops.kvq.quantize_tile_)
            found = torch.ops.kvq.quantize_tile(key, value, balance, *case.bits)
        count = different_bytes(found, records)
        count += sum(map(different_bytes, state, wanted))
        checks.append(Check(f"bytes unlike the reference's, {_name(case, tier)}", count, 0))
    return checks


def different_bytes(x: Tensor, y: Tensor) -> int:
    """In how many bytes two tensors differ."""
    if x.shape != y.shape or x.dtype != y.dtype:
        return max(x.nbytes, y.nbytes, 1)
    return int((x.view(torch.uint8) != y.view(torch.uint8)).sum())


def appended(case: Case, append: Callable[..., None]) -> State:
    """The state after the steps of a case."""
    state = empty_state(case)
    append_steps(case, state, append, *make_tokens(case))
    return state


def tiled(tokens: tuple[Tensor, Tensor], tiles: int) -> tuple[Tensor, Tensor]:
    """The first tokens as tiles, ``[tiles, kv_heads, 64, dim]``."""
    used = tiles * formats.TILE_TOKENS
    key, value = (
        x[0, :, :used].unflatten(1, (tiles, -1)).transpose(0, 1).contiguous() for x in tokens
    )
    return key, value


def measure(case: Case, repeats: int) -> list[dict[str, Any]]:
    """Nanoseconds of every tier; the portable one for one case only."""
    tiers = torch_kvq.cpu_capabilities().available
    if case != make_case(DIMS[0], BITS[0]):
        tiers = tuple(tier for tier in tiers if tier != "scalar")
    key, value = make_tokens(case)
    calls = {
        "append": (one_by_one(case, key, value), STEPS),
        "prompt": (at_once(case, key[:, :, :PROMPT], value[:, :, :PROMPT]), PROMPT),
        "tile": (as_tiles(case, key, value), PROMPT),
    }
    contestants = [
        Contestant(f"{name} {tier}", [call], None if tier == "reference" else tier)
        for name, (call, _) in calls.items()
        for tier in tiers
    ]
    times = timing.interleaved(contestants, repeats)
    rows = []
    for tier in tiers:
        row: dict[str, Any] = {"name": _name(case, tier)}
        for name, (_, tokens) in calls.items():
            found = times[f"{name} {tier}"]
            row[name] = 1e3 * found.median / (tokens * HEADS)
            row[f"{name}_iqr"] = 1e3 * found.iqr / (tokens * HEADS)
        rows.append(row)
    return rows


def one_by_one(case: Case, key: Tensor, value: Tensor) -> Callable[[], None]:
    """Store `STEPS` tokens after the prompt, each in a call; then the prompt is all there is."""
    state = appended(case, torch.ops.kvq.quantize_tile_)
    lengths = torch.tensor([[0, PROMPT, formats.quantized_tokens(PROMPT, 0, **case.rule())]])
    tokens = list(zip(*(x[:, :, PROMPT:].split(1, 2) for x in (key, value)), strict=True))

    def call() -> None:
        state.lengths.copy_(lengths)
        for pair in tokens:
            torch.ops.kvq.quantize_tile_(*state, *pair, *case.bits)

    return call


def at_once(case: Case, key: Tensor, value: Tensor) -> Callable[[], None]:
    """Store a prompt in a call."""
    state = appended(case, torch.ops.kvq.quantize_tile_)
    key, value = key.contiguous(), value.contiguous()

    def call() -> None:
        state.lengths.zero_()
        torch.ops.kvq.quantize_tile_(*state, key, value, *case.bits)

    return call


def as_tiles(case: Case, key: Tensor, value: Tensor) -> Callable[[], object]:
    """Encode a prompt that lies in tiles already."""
    key, value = tiled((key, value), PROMPT // formats.TILE_TOKENS)
    balance = torch_kvq.key_balance(key[:1])
    return partial(torch.ops.kvq.quantize_tile, key, value, balance, *case.bits)


def prefill_share(tokens: int, repeats: int) -> Table:
    """The part of reading a prompt that storing it packed takes."""
    model, ids = model_and_text(tokens)
    reading, storing = [], []
    for _ in range(repeats):
        seconds, layers = read(model, ids)
        reading.append(seconds)
        start = time.perf_counter()
        filled(KVQCache(BITS[0]), layers)
        storing.append(time.perf_counter() - start)
    read_time, store_time = Timing.of(reading), Timing.of(storing)
    columns = [
        Column("name", f"SmolLM2-135M, {tokens} tokens"),
        Column("median", "median ms", ".1f"),
        Column("minimum", "min ms", ".1f"),
        Column("share", "of prefill", ".2%"),
    ]
    rows = [
        {
            "name": name,
            "median": found.median / 1e3,
            "minimum": found.minimum / 1e3,
            "share": found.median / read_time.median,
        }
        for name, found in (
            ("prefill with DynamicCache", read_time),
            (f"KVQCache(bits={BITS[0]}): storing the same tokens", store_time),
        )
    ]
    return Table("prefill", "Storing a prompt", columns, rows, is_speed=True)


def read(model: Any, ids: Tensor) -> tuple[float, Tokens]:
    """Seconds of a prefill, and the keys and values that it gives."""
    from transformers import DynamicCache

    cache = DynamicCache()
    start = time.perf_counter()
    model(ids, past_key_values=cache, logits_to_keep=1)
    seconds = time.perf_counter() - start
    return seconds, [(layer.keys, layer.values) for layer in cache.layers]


def _name(case: Case, tier: str) -> str:
    return f"dim {case.key_dim}, {case.bits[0]} bits, {tier}"
