"""Weights that are split by their singular values, and the files that keep them."""

from __future__ import annotations

import copy
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache

from tests.models import tiny_model, token_ids
from torch_kvq import XQuantCache
from torch_kvq.cache.x_source import Latent
from torch_kvq.integrations import latent
from torch_kvq.integrations.latent import split

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

PROMPT = token_ids(1, 120)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_KVQ_CACHE", str(tmp_path))
    return tmp_path / "latent"


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The weights that were split, not loaded."""
    made: list[torch.Tensor] = []
    factors = latent.latent_factors

    def noted(weight: torch.Tensor) -> Any:
        made.append(weight)
        return factors(weight)

    monkeypatch.setattr(latent, "latent_factors", noted)
    return made


def weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 64, 128, generator=generator)
    return key, value


def same(a: Latent, b: Latent) -> bool:
    return all(map(torch.equal, a, b))


def test_weights_are_split_once(
    folder: Path, splits: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    totals = []
    progress = latent.tqdm

    def noted(items: Any, **options: Any) -> Any:
        totals.append(len(items))
        return progress(items, **options)

    monkeypatch.setattr(latent, "tqdm", noted)
    caches = [XQuantCache(4, mode="latent", model=model) for _ in range(2)]
    other = copy.deepcopy(model)
    caches.append(XQuantCache(4, mode="latent", model=other))
    assert totals == [2, 0, 2] and len(splits) == 4
    assert len(list(folder.iterdir())) == 2
    assert all(cache.layers[1].source.is_split for cache in caches)


def test_weights_that_changed_are_split_again(splits: list[torch.Tensor]) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    before = XQuantCache(16, mode="latent", model=model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(2)
        cache = XQuantCache(16, mode="latent", residual_length=10, model=model)
        assert len(splits) == 6
        model(PROMPT, past_key_values=cache)
        got = model(PROMPT[:, :5], past_key_values=cache).logits
        wanted = DynamicCache()
        model(PROMPT, past_key_values=wanted)
        want = model(PROMPT[:, :5], past_key_values=wanted).logits
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        model.bfloat16()
        XQuantCache(16, mode="latent", model=model)
    assert before.layers[1].source.latent.key_rest.dtype == torch.bfloat16


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other"])
def test_damaged_files_are_made_anew(
    damage: str, folder: Path, splits: list[torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    wanted = split(*weights())
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    flipped = whole[:-100] + bytes([whole[-100] ^ 64]) + whole[-99:]
    path.write_bytes(
        {"empty": b"", "cut": whole[:-50], "flipped": flipped, "other": b"text"}[damage]
    )
    assert same(split(*weights()), wanted) and len(splits) == 4
    assert f"{path} is damaged and is made anew" in caplog.messages[-1]
    assert path.read_bytes() == whole
    caplog.clear()
    assert same(split(*weights()), wanted) and len(splits) == 4 and not caplog.messages


def test_folder_that_cannot_be_written(
    tmp_path: Path,
    splits: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = split(*weights())
    file = tmp_path / "file"
    file.touch()
    for place in (file, file / "below"):
        monkeypatch.setenv("TORCH_KVQ_CACHE", str(place))
        assert same(split(*weights()), wanted)
        assert "cannot be kept" in caplog.messages[-1] and str(place) in caplog.messages[-1]
    assert len(splits) == 6


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o500)
    try:
        split(*weights())
    finally:
        tmp_path.chmod(0o700)
    assert "cannot be kept" in caplog.messages[-1]


def test_two_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finishes while this one is at work."""
    factors, inner = latent.latent_factors, []

    def interrupted(weight: torch.Tensor) -> Any:
        if not inner:
            inner.append(None)
            inner[0] = split(*weights())
        return factors(weight)

    monkeypatch.setattr(latent, "latent_factors", interrupted)
    outer = split(*weights())
    assert same(outer, inner[0])
    (path,) = folder.iterdir()
    assert same(latent._load(path), outer)


def _split_in_a_process(queue: Any) -> None:
    torch.set_num_threads(1)
    queue.put([part.tolist() for part in split(*weights())])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_processes_at_once(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    processes = [context.Process(target=_split_in_a_process, args=(queue,)) for _ in range(3)]
    for process in processes:
        process.start()
    found = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes)
    assert found[0] == found[1] == found[2]
    (path,) = folder.iterdir()
    assert same(latent._load(path), split(*weights()))
