"""Decoding with int8 weights, where attention is a larger part of a token; one thread, compiled."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_kvq import KVQCache

from . import environment
from .generate import EXACT, PACKED, QUALITY_ALLOWANCE, WARM_UP, Decoding
from .model import Tokens, continuation, filled, model_and_text, prefill
from .quality import TARGETS
from .report import Check, Column, Report, Table
from .timing import Timing
from .trial import Divergence

BITS = 4
CONTEXTS = (128, 4096)
QUICK_CONTEXTS = (128, 512)

FLOAT, WEIGHTS, BOTH = "float32", "int8 weights, bfloat16", "int8 weights and activations"

LIMITS = {FLOAT: QUALITY_ALLOWANCE * TARGETS[BITS], WEIGHTS: 0.03, BOTH: 0.1}
"""Greatest mean divergence from the model in float32 with the uncompressed cache."""

COLUMNS = [
    Column("context", "tokens of context", "d"),
    Column("weights", "weights"),
    Column("name", "cache"),
    Column("median", "median ms/token", ".1f"),
    Column("iqr", "IQR ms", ".1f"),
    Column("minimum", "min ms", ".1f"),
    Column("speedup", "x of DynamicCache", ".2f"),
    Column("divergence", "mean KL", ".4f"),
]


def missing() -> str | None:
    """Why weights cannot be quantised here, None when they can."""
    return None if importlib.util.find_spec("torchao") else "torchao is not installed"


def with_weights(model: Any, weights: str) -> Any:
    """A copy of the model with its linear layers, the last one included, in other weights."""
    model = copy.deepcopy(model)
    if weights == FLOAT:
        return model
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    if weights == WEIGHTS:
        # PyTorch's kernel for int8 weights alone is fast for bfloat16 only. Buffers stay: rotary
        # frequencies in bfloat16 are off by whole positions in a long context.
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        quantize_(model, Int8WeightOnlyConfig())
    else:
        quantize_(model, Int8DynamicActivationInt8WeightConfig())
    return model


def compiled(model: Any) -> Callable[..., Any]:
    """The model's step, whose weights are not looked at again."""
    options = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
    step: Callable[..., Any] = torch.compile(model.forward, fullgraph=True, options=options)
    return step


# Among the options of torch.compile, freezing leaves quantised weights as they are.
@torch._inductor.config.patch(freezing=True)
@torch.no_grad()
def run(quick: bool = False) -> Report:
    """Decode with all weights and both caches, and report how fast if the predictions are right."""
    torch.set_num_threads(1)
    contexts, steps, rounds = (QUICK_CONTEXTS, 8, 1) if quick else (CONTEXTS, 24, 3)
    model, ids = model_and_text(max(contexts) + steps)
    tokens, _ = prefill(model, ids[:, : max(contexts)], chunk=1024)
    texts = {length: ids[:, length : length + steps] for length in contexts}
    exact = {
        length: continuation(model, filled(_dynamic(model), _first(tokens, length)), rest, steps)
        for length, rest in texts.items()
    }
    rows, checks = [], []
    for weights in LIMITS:
        if (weights != FLOAT and missing()) or (quick and weights == WEIGHTS):
            continue
        variant = with_weights(model, weights)
        makers = {PACKED: _packed} if quick else {EXACT: _dynamic, PACKED: _packed}
        decodings = decode(variant, makers, tokens, texts, rounds)
        divergences = {
            (name, length): Divergence.of(found.logits, exact[length], texts[length][0, 1:]).mean
            for (name, length), found in decodings.items()
        }
        checks += _checks(weights, decodings, divergences)
        rows += _rows(weights, decodings, divergences)
    rows.sort(key=lambda row: row["context"])
    settings = {
        "model": "SmolLM2-135M-Instruct, all linear layers as named, attention: sdpa",
        "int8": missing() or f"torchao {environment.version('torchao')}",
        "compiled": "both caches as they grow; weights are frozen and not guarded",
        "context": "read by the model in float32",
        "mean KL": "from the model in float32 with DynamicCache, not compiled",
        "repeats": f"{rounds} runs of {steps - WARM_UP} tokens, one call each, the caches in turn",
    }
    tables = [Table("decoding", "Decoding, compiled", COLUMNS, rows, is_speed=True)]
    return Report("weights", environment.describe(), settings, checks, tables)


def decode(
    model: Any,
    makers: Mapping[str, Callable[[Any], Any]],
    tokens: Tokens,
    texts: dict[int, Tensor],
    rounds: int,
) -> dict[tuple[str, int], Decoding]:
    """Decode the texts with each cache at each context."""
    torch._dynamo.reset()
    step = compiled(model)
    decodings = {(name, length): Decoding() for name in makers for length in texts}
    for make in makers.values():
        # The first steps of a cache compile, once for a step and once for those of any length.
        cache = _filled(make, model, tokens, min(texts))
        Decoding().run_cache(step, cache, texts[min(texts)][:, :4])
    for _ in range(rounds):
        for (name, length), decoding in decodings.items():
            decoding.run_cache(step, _filled(makers[name], model, tokens, length), texts[length])
    return decodings


def _filled(make: Callable[[Any], Any], model: Any, tokens: Tokens, length: int) -> Any:
    dtype = model.dtype
    return filled(make(model), [(k.to(dtype), v.to(dtype)) for k, v in _first(tokens, length)])


def _first(tokens: Tokens, length: int) -> Tokens:
    return [(key[:, :, :length], value[:, :, :length]) for key, value in tokens]


def _dynamic(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _packed(model: Any) -> Any:
    return KVQCache(BITS, config=model.config)


def _checks(
    weights: str,
    decodings: dict[tuple[str, int], Decoding],
    divergences: dict[tuple[str, int], float],
) -> list[Check]:
    """Whether what was timed was right, and packed throughout."""
    checks = []
    for (name, length), decoding in decodings.items():
        what = f"{weights}, {name}, {length} tokens"
        checks.append(Check(f"mean KL, {what}", divergences[name, length], LIMITS[weights]))
        if name == PACKED:
            checks.append(Check(f"layers decoded, {what}", decoding.materialized, 0))
    return checks


def _rows(
    weights: str,
    decodings: dict[tuple[str, int], Decoding],
    divergences: dict[tuple[str, int], float],
) -> list[dict[str, Any]]:
    rows = []
    for (name, length), decoding in decodings.items():
        time = Timing.of(decoding.seconds)
        exact = decodings.get((EXACT, length))
        rows.append(
            {
                "context": length,
                "weights": weights,
                "name": name,
                "median": time.median / 1e3,
                "iqr": time.iqr / 1e3,
                "minimum": time.minimum / 1e3,
                "speedup": exact and Timing.of(exact.seconds).median / time.median,
                "divergence": divergences[name, length],
            }
        )
    return rows
