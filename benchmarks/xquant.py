"""Caches of layer inputs: what they do to predictions, what they cost, and the bytes they take.

Keys and values are rebuilt at every step, so that the arithmetic of a step grows with the context.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator

import torch

from . import (
    environment,
    xquant_accuracy,
    xquant_bytes,
    xquant_latency,
    xquant_models,
    xquant_operator,
)
from .model import model_and_text
from .report import Report, worst

CONTEXTS = (512, 1024, 2048, 4096, 8192)
QUICK_CONTEXTS = (512, 1024)
OPERATOR_TOKENS = 2048


@contextlib.contextmanager
def files_of_its_own() -> Iterator[None]:
    """Keep the split weights of random models out of the user's cache."""
    before = os.environ.get("TORCH_KVQ_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCH_KVQ_CACHE"] = folder
        try:
            yield
        finally:
            del os.environ["TORCH_KVQ_CACHE"]
            if before is not None:
                os.environ["TORCH_KVQ_CACHE"] = before


@files_of_its_own()
@torch.inference_mode()
def run(quick: bool = False) -> Report:
    """Compare predictions, count operations and bytes, then time operator, decoding and storing."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
    contexts, steps, rounds = (QUICK_CONTEXTS, 2, 1) if quick else (CONTEXTS, 4, 2)
    filled, prompt, prompts = (512, 256, 1) if quick else (4096, 1024, 3)
    shapes, repeats = (xquant_operator.SHAPES[:2], 7) if quick else (xquant_operator.SHAPES, 9)
    past, new = (516, 64) if quick else (1924, 128)
    model, ids = model_and_text(past + new)
    tables = xquant_accuracy.tables(model, ids[:, : past + new], past)
    checks = xquant_accuracy.checks(tables)
    operator = xquant_operator.measure(OPERATOR_TOKENS, repeats, shapes)
    # A few repeats are too few for a limit of speed.
    checks += [] if quick else xquant_operator.gains(operator[0].rows)
    for table, found in (
        xquant_operator.count(),
        xquant_bytes.measure(filled),
        operator,
        *(xquant_latency.decode(key, contexts, steps, rounds) for key in xquant_latency.SHAPES),
    ):
        tables.append(table)
        checks += found
    tables.append(xquant_latency.store(prompt, prompts))
    settings = {
        "accuracy": f"SmolLM2-135M-Instruct, float32: {past} tokens of Python's documentation, "
        f"read exactly, then {new} more; all caches keep the last 128 to 191 tokens exact",
        "other models": "Llamas with random weights, query heads / KV heads / head dim, one row; "
        "for decoding and storing MLPs of as many channels as the layers' input and "
        f"first_layers={xquant_models.FIRST_LAYERS}, for the bytes bfloat16",
        "decoding": f"{rounds} runs of {steps} tokens, one call each, the caches in turn; contexts "
        "were read without attention between their tokens",
        "operator": f"{repeats} repeats, more of short calls, {xquant_operator.RECENT} tokens "
        "exact; the same data each time, as it is arithmetic that counts",
        "storing": f"{prompts} prompts for each cache in turn; packing: a page of "
        "all layers that is due",
    }
    return Report("xquant", environment.describe(), settings, worst(checks), tables)
