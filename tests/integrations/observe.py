"""What a packed cache does with each model, as runs beside Transformers' own cache show it."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

import torch_kvq
from tests.integrations import scenarios
from tests.integrations.scenarios import Load, Scenario, for_model, inputs
from tests.models import tiny_config, tiny_model
from torch_kvq import KVQCache, TieredCache, XQuantCache
from torch_kvq.cache.tiered_layer import TieredLayer
from torch_kvq.cache.x_layer import XQuantLayer

LOAD = Load(tokens=80, new_tokens=5, padding=(44, 3, 0), chunk=40, short=3)
_OPTIONS = {"quantized_start": 70, "residual_length": 4, "sink_tokens": 2}

FAILED = "FAILS"
FIRST = "first"
"""In the place of an attention implementation: ``"sdpa"``, or ``"eager"`` for a model without."""
_NOT_OFFERED = "not offered"
_LOSSLESS: dict[Any, dict[str, Any]] = {
    KVQCache: {"bits": 16, **_OPTIONS},
    TieredCache: {
        "near_ratio": 1.0,
        "promote": False,
        "quantized_start": 70,
        "window": 4,
        "sink_tokens": 2,
    },
    XQuantCache: {"bits": 16, "mode": "x", "residual_length": 4},
}
"""Options with which a cache packs the tokens of a run, and loses nothing."""

_ADVICE = "keys and values of this model take"
"""A warning about the sizes of a model, whatever is done with it."""

_TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(frozen=True, eq=False)
class Case:
    """A column of the page.

    Attributes:
        title: heading.
        run: what is run.
        options: of the cache.
        model: changes of the model's configuration.
        attention: implementations that are asked for.
        config: how a packed cache gets to know the model: "bound" by ``generate``, "given" its
            configuration, or not at all, "unknown".
        by_name: the cache is made by ``generate``: from its arguments, or from the model's own
            generation configuration.
        cache: the class of the cache.
    """

    title: str
    run: Scenario
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    attention: tuple[str, ...] = ("sdpa", "eager")
    config: Literal["bound", "given", "unknown"] = "bound"
    by_name: str = ""
    cache: Any = KVQCache


@dataclass(frozen=True)
class Outcome:
    """What was observed.

    Attributes:
        word: in short.
        note: the reason, an error or a warning.
    """

    word: str
    note: str = ""


def _main_uses(cache: Any) -> tuple[Case, ...]:
    """The uses that are run for caches beside `KVQCache`, with one attention implementation."""
    runs = {
        "greedy": scenarios.greedy,
        "left padding": scenarios.padded,
        "beams": scenarios.beams,
        "chunks": scenarios.chunked,
        "second turn": scenarios.two_turns,
        "prompt lookup": scenarios.prompt_lookup,
    }
    return tuple(Case(title, run, attention=(FIRST,), cache=cache) for title, run in runs.items())


GROUPS: dict[str, tuple[Case, ...]] = {
    "decoding": (
        Case("greedy", scenarios.greedy),
        Case("left padding", scenarios.padded),
        Case("beams", scenarios.beams),
        Case("samples", scenarios.sampling),
        Case("assistant", scenarios.assisted),
        Case("prompt lookup", scenarios.prompt_lookup),
    ),
    "calls": (
        Case("embeddings", scenarios.embeddings),
        Case("chunks", scenarios.chunked),
        Case("second turn", scenarios.two_turns),
        Case("padded second turn", scenarios.two_padded_turns),
        Case("copied prefix", scenarios.copied_prefix, config="given"),
        Case("rows", scenarios.rows, config="given"),
        Case("crop", scenarios.cropped, config="given"),
    ),
    "settings": (
        Case('`"kvq"`', scenarios.greedy, attention=("kvq",)),
        Case('`"flex_attention"`', scenarios.greedy, attention=("flex_attention",)),
        Case("bfloat16", scenarios.logits, config="given", model={"dtype": torch.bfloat16}),
        Case("float16", scenarios.logits, config="given", model={"dtype": torch.float16}),
        Case("attention weights", scenarios.attention_weights),
        Case("training", scenarios.training, config="given"),
    ),
    "caches": (
        Case("static", scenarios.greedy, options={"static": True}),
        Case("strict", scenarios.greedy, options={"strict": True}),
        Case("by name", scenarios.greedy, by_name="arguments"),
        Case("by name, from the model", scenarios.greedy, by_name="model"),
        Case("without a configuration", scenarios.logits, config="unknown"),
    ),
    "tiers": _main_uses(TieredCache),
    "inputs": _main_uses(XQuantCache),
}


def observe(name: str, attention: str, case: Case) -> Outcome:
    """Run a case with Transformers' own cache and with a packed one."""
    model = _model(name, attention, case)
    if model is None:
        return Outcome(_NOT_OFFERED)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        # A compiler has nothing to do with the result, and takes minutes.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        wanted = _wanted(model, case.run, case.config != "unknown")
        if wanted is None:
            return Outcome("not with DynamicCache")
        expected, expected_logits = wanted
        logits = stack.enter_context(_last_logits(model))
        said = stack.enter_context(_messages())
        try:
            got, cache = _run_packed(model, case)
        except Exception as error:
            return _refused(error)
        (got_logits,) = logits
        if not (_agree(got, expected) and _agree(got_logits, expected_logits)):
            return Outcome(FAILED, "other tokens or logits than with DynamicCache")
        return _judge(model, cache, [text for text in said if not text.startswith(_ADVICE)])


def _model(name: str, attention: str, case: Case) -> Any:
    """The model, None where it has no such attention implementation."""
    for implementation in ("sdpa", "eager") if attention == FIRST else (attention,):
        with contextlib.suppress(ValueError, KeyError):
            return tiny_model(name, implementation, **case.model)
    return None


@functools.cache
def _wanted(model: Any, run: Scenario, is_known: bool) -> tuple[Tensor, Tensor] | None:
    """Result and last logits with Transformers' own cache, None where that cannot do it."""
    cache = DynamicCache(config=model.config) if is_known else DynamicCache()
    with _last_logits(model) as logits:
        try:
            return run(model, for_model(model, cache), LOAD), logits[0]
        except Exception:
            return None


def _run_packed(model: Any, case: Case) -> tuple[Tensor, Any]:
    if case.by_name:
        return _run_by_name(model, case)
    known = {"config": model.config} if case.config == "given" else {}
    cache = case.cache(**_LOSSLESS[case.cache], **known, **case.options)
    return case.run(model, for_model(model, cache), LOAD), cache


def _run_by_name(model: Any, case: Case) -> tuple[Tensor, Any]:
    name = {
        "cache_implementation": "quantized",
        "cache_config": {"backend": "kvq", "nbits": 16, **_OPTIONS},
    }
    options = {"return_dict_in_generate": True, **LOAD.greedy}
    if case.by_name == "arguments":
        result = model.generate(**inputs(model, LOAD.prompt), **name, **options)
    else:
        before = model.generation_config
        model.generation_config = transformers.GenerationConfig(**before.to_dict() | name)
        try:
            result = model.generate(**inputs(model, LOAD.prompt), **options)
        finally:
            model.generation_config = before
    cache = result.get("cache", result.get("past_key_values"))
    return result.sequences, getattr(cache, "self_attention_cache", cache)


@contextlib.contextmanager
def _last_logits(model: Any) -> Iterator[list[Tensor]]:
    """What the last call of a model gave for the next token: tokens alone hide small errors."""
    logits: list[Tensor] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        logits[:] = [output.logits[:, -1].detach()]

    hook = model.register_forward_hook(keep)
    try:
        yield logits
    finally:
        hook.remove()


@contextlib.contextmanager
def _messages(level: int = logging.WARNING) -> Iterator[list[str]]:
    """What the package says at a level and above."""
    said: list[str] = []
    handler = logging.Handler(level)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("torch_kvq")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def _refused(error: Exception) -> Outcome:
    """An error of the package itself is meant; another one is not."""
    where = traceback.extract_tb(error.__traceback__)[-1].filename
    is_own = Path(where).is_relative_to(Path(torch_kvq.__file__).parent)
    # How far off a check found something differs from run to run.
    said = re.sub(r"by \d\S* of", "by a part of", str(error))
    return Outcome("refused" if is_own else FAILED, f"{type(error).__name__}: {said}")


def _judge(model: Any, cache: Any, said: list[str]) -> Outcome:
    layers = cache.packed_layers
    if not layers:
        (message,) = said
        return Outcome("stock layer", message.partition("not: ")[2])
    if any(_dtype(layer) != model.dtype for layer in layers):
        return Outcome(FAILED, "another dtype than the model's")
    if not any(_packed_tokens(layer) for layer in layers):
        return Outcome(FAILED, "nothing was packed")
    if len(said) > 1:
        return Outcome(FAILED, "several warnings")
    return Outcome("materialised" if cache.materialized else "fused", "".join(said))


def _dtype(layer: Any) -> torch.dtype:
    """What a layer holds exact tokens in, none of which are token numbers."""
    state = layer.state
    if isinstance(layer, XQuantLayer):
        return next(x.dtype for x in (*state.recent, layer._like) if x.is_floating_point())
    return (state.near_key if isinstance(layer, TieredLayer) else state.exact_key).dtype


def _packed_tokens(layer: Any) -> int:
    if isinstance(layer, XQuantLayer):
        return layer.state.quantized
    return int(layer.state.lengths[:, 2].sum())


def _agree(got: Tensor, expected: Tensor) -> bool:
    """Equal tokens; logits may differ as much as another order of summation makes them."""
    if not got.is_floating_point() or got.shape != expected.shape:
        return torch.equal(got, expected)
    difference = (got.float() - expected.float()).norm() / expected.float().norm()
    return got.dtype == expected.dtype and bool(difference <= _TOLERANCE.get(got.dtype, 1e-3))


@functools.cache
def cell(name: str, case: Case) -> tuple[tuple[str, Outcome], ...]:
    """What was observed with each attention implementation that the model offers."""
    seen = [(attention, observe(name, attention, case)) for attention in case.attention]
    return tuple(pair for pair in seen if pair[1].word != _NOT_OFFERED)


def layout(name: str) -> str:
    """How many layers of a model are packed, and why the others are not."""
    logger = logging.getLogger("torch_kvq")
    before = logger.level
    logger.setLevel(logging.INFO)
    try:
        with _messages(logging.INFO) as said:
            cache = KVQCache(16, config=tiny_config(name), **_OPTIONS)
    finally:
        logger.setLevel(before)
    reasons = said[-1].partition("; ")[2]
    packed = f"{len(cache.packed_layers)} of {len(cache.layers)}"
    return f"{packed}; {reasons}" if reasons else packed
