"""What the benchmarks of layer inputs run and compute, without their measurements."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache

from benchmarks import xquant, xquant_bytes, xquant_latency, xquant_models, xquant_operator
from benchmarks.report import Check
from benchmarks.xquant_latency import Decoding
from benchmarks.xquant_models import Shape, empty_caches, fill, name_of, random_ids
from torch_kvq import XQuantCache

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

SMALL = Shape(2, 1, 3)
TOKENS = 300


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCH_KVQ_CACHE", str(tmp_path))
    with torch.inference_mode():
        yield


def small_model() -> Any:
    return SMALL.model(intermediate=64)


def verdicts(checks: list[Check]) -> list[bool]:
    return [check.passed for check in checks]


def test_split_weights_are_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with xquant.files_of_its_own():
        folder = Path(os.environ["TORCH_KVQ_CACHE"])
        XQuantCache(mode="latent", model=small_model())
        assert list(folder.iterdir())
    assert not folder.exists() and not list(tmp_path.iterdir())
    assert os.environ["TORCH_KVQ_CACHE"] == str(tmp_path)


def test_a_token_of_a_filled_cache_depends_on_no_other() -> None:
    model, ids = small_model(), random_ids(20)
    first = fill(model, DynamicCache(), ids)
    other = fill(model, DynamicCache(), (ids + (torch.arange(20) < 10)) % xquant_models.VOCABULARY)
    for mine, theirs in zip(first.layers, other.layers, strict=True):
        assert torch.equal(mine.keys[:, :, 10:], theirs.keys[:, :, 10:])
        assert not torch.equal(mine.values[:, :, :10], theirs.values[:, :, :10])
    assert model.config._attn_implementation == "sdpa"


def test_all_caches_are_filled_with_the_same() -> None:
    model, ids = small_model(), random_ids(TOKENS)
    decodings = xquant_latency.contestants(model, ids)
    names = [name_of(mode, way) for mode in xquant_models.MODES for way in (True, False)]
    assert list(decodings) == [xquant_models.EXACT, xquant_models.PACKED, *names]
    for decoding in decodings.values():
        decoding.run(model, random_ids(3))
        assert len(decoding.seconds) == 3 - xquant_latency.WARM_UP
        assert decoding.cache.get_seq_length() == TOKENS
    assert all(verdicts(xquant_latency.gate(decodings)))
    exact = decodings[xquant_models.EXACT].logits
    for decoding in decodings.values():
        assert (decoding.logits - exact).norm() / exact.norm() < 0.2
    rows = xquant_latency.decoding_rows(TOKENS, decodings)
    assert rows[0]["slower"] == rows[0]["smaller"] == 1
    assert rows[0]["mebibytes"] == TOKENS * 3 * 64 * 2 * 4 / 2**20
    assert all(row["smaller"] > 1 for row in rows[1:])


def test_gate_refuses_other_logits_and_caches_that_were_decoded() -> None:
    model, ids = small_model(), random_ids(TOKENS)
    decodings = xquant_latency.contestants(model, ids)
    for decoding in decodings.values():
        decoding.run(model, random_ids(2))
    wrong, decoded = (decodings[name_of(mode, True)] for mode in ("x", "latent"))
    wrong.logits = 1.01 * wrong.logits
    decoded.cache.layers[1].materialize(TOKENS)
    assert verdicts(xquant_latency.gate(decodings)) == [False, *[True] * 4, False]


def test_a_run_sets_the_way_of_its_contestant() -> None:
    model = small_model()
    cache = fill(model, empty_caches(model)[name_of("x")](), random_ids(TOKENS))
    for way in (True, False):
        Decoding(cache, way).run(model, random_ids(2))
        assert {layer.options.absorb_value for layer in cache.packed_layers} == {way}


@pytest.mark.parametrize("mode", xquant_models.MODES)
def test_packing_is_timed_over_one_page(mode: str) -> None:
    model = small_model()
    cache = fill(model, empty_caches(model)[name_of(mode)](), random_ids(TOKENS))
    before = [layer.state.quantized for layer in cache.packed_layers]
    assert xquant_latency.page_seconds(cache) > 0
    more = [layer.state.quantized - old for layer, old in zip(cache.layers, before, strict=True)]
    assert more == [64 if mode == "latent" else 0, 64, 64]


def test_storing_in_figures() -> None:
    prompts = {xquant_models.EXACT: [1.0, 1.0], "other": [2.0, 4.0]}
    packing: dict[str, list[float]] = {xquant_models.EXACT: [], "other": [64e-6, 128e-6]}
    exact, other = xquant_latency.storing_rows(SMALL, 600, prompts, packing)
    assert (exact["rate"], exact["share"], exact["packing"]) == (600, 1, None)
    assert other["rate"] == pytest.approx(200) and other["share"] == pytest.approx(1 / 3)
    assert other["packing"] == pytest.approx(1.5)


def test_absorbing_has_to_pay() -> None:
    ways = list(xquant_operator.WAYS)
    rows = [
        {"shape": "", "dtype": "", "name": way, "speedup": speedup}
        for way, speedup in zip(ways, (1.0, 1.7, 1.5), strict=True)
    ]
    checks = xquant_operator.gains(rows)
    assert [check.passed for check in checks] == [True, False]
    assert checks[0].value == pytest.approx(1 / 1.7)


def test_ways_of_a_shape() -> None:
    """A rotary embedding keeps the weight of keys where it is."""
    rotary = xquant_operator.Shape(2, 1, 32, 64)
    plain = xquant_operator.Shape(2, 1, 32, 64, is_rotary=False)
    assert list(plain.ways) == list(xquant_operator.WAYS)
    assert list(rotary.ways) == list(xquant_operator.WAYS)[:2]
    layer = xquant_operator.Layer(plain, 200, 1, torch.float32)
    results = [layer.attend(way) for way in plain.ways]
    assert all(xquant_operator.worst_head(got, results[0]) < 1e-5 for got in results)
    assert xquant_operator.worst_head(2 * results[0], results[0]) == pytest.approx(1)


def test_counted_operations_are_held_to_the_cost_model(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = (xquant_operator.Shape(4, 2, 32, 128, is_rotary=False),)
    monkeypatch.setattr(xquant_operator, "COUNTED_SHAPES", shapes)
    table, (check,) = xquant_operator.count()
    assert [row["ratio"] for row in table.rows] == [1] * 6 and check.value == 0
    monkeypatch.setattr(xquant_operator, "remat_flops", lambda *_, **__: 10**6)
    assert not xquant_operator.count()[1][0].passed


def test_bytes_are_those_of_the_formula_and_the_window() -> None:
    shape = Shape(2, 2, 3, dtype=torch.bfloat16)
    good = xquant_bytes.Setting(shape, "latent", 4, least=3.5)
    small = xquant_bytes.Setting(shape, "latent", 4, least=4.0)
    table, checks = xquant_bytes.measure(400, [good, small])
    assert verdicts(checks) == [True, True, False, True]
    row = table.rows[0]
    assert row["fp16"] == 3 * 2 * 2 * 128
    assert row["per_token"] == 3 * 2 * 128 * (4 / 8 + 1 / 32) + 4 + 3 * 4 / 64
    assert row["window"] == 3 * 2 * 196 * 128 * 2 / 2**20
    assert abs(row["beyond"]) < 0.01
    assert row["filled_factor"] < row["factor"]
