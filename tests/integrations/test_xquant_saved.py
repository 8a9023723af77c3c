"""Caches of layer inputs that are saved, loaded and bound to their model again."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.models import tiny_model, token_ids
from torch_kvq import XQuantCache

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

MODES = ["x", "cl", "latent"]
PROMPT = token_ids(2, 200)
NEXT = token_ids(2, 12, seed=3)
GREEDY = {"max_new_tokens": 5, "do_sample": False}


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_KVQ_CACHE", str(tmp_path))


def model() -> Any:
    return tiny_model("llama", num_hidden_layers=3)


def filled(mode: str, **given: Any) -> Any:
    """A cache of two rows, whose first layer has token numbers if it is given such."""
    cache = XQuantCache(4, mode=mode, residual_length=10, first_layers=1, model=model())
    with torch.no_grad():
        model()(**(given or {"input_ids": PROMPT}), past_key_values=cache)
    return cache


def pickled(cache: Any) -> bytes:
    return pickle.dumps(cache)


def saved(cache: Any) -> bytes:
    file = io.BytesIO()
    torch.save(cache, file)
    return file.getvalue()


def load(data: bytes) -> Any:
    if data.startswith(b"PK"):
        return torch.load(io.BytesIO(data), weights_only=False)
    return pickle.loads(data)


def payload(cache: Any) -> int:
    """Bytes of what a cache holds: pages that its rows have, exact tokens, positions."""
    size = cache._shared.positions.nbytes
    for layer in cache.packed_layers:
        table = layer.state.table
        pages = {page for row in table.rows for page in row}
        size += table.pool.tiles[sorted(pages)].nbytes
        size += sum(part.nbytes for part in layer.state.recent)
    return size


def go_on(cache: Any) -> torch.Tensor:
    """Tokens after some that are given, for a cache that ``generate`` binds."""
    ids = torch.cat((torch.zeros(2, cache.get_seq_length(), dtype=torch.int64), NEXT), 1)
    return model().generate(ids, past_key_values=cache, **GREEDY)[:, -5:]


CHANGES = {
    "as it is": lambda cache: cache,
    "fork": lambda cache: cache.fork(),
    "cut": lambda cache: cache.crop(-90),
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
}


@pytest.mark.parametrize(
    ("save", "change"),
    [(saved, "as it is"), *((pickled, change) for change in CHANGES)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
@pytest.mark.parametrize("mode", MODES)
def test_tokens_after_loading(save: Any, change: str, mode: str) -> None:
    cache = filled(mode)
    cache = CHANGES[change](cache) or cache
    data = save(cache)
    loaded = load(data)
    assert payload(loaded) == payload(cache)
    assert torch.equal(go_on(loaded), go_on(cache))


@pytest.mark.parametrize("mode", MODES)
def test_only_what_is_held_is_written(mode: str) -> None:
    cache = filled(mode)
    whole = len(pickle.dumps(cache))
    overhead = whole - payload(cache)
    assert 0 < overhead < 4000 * len(cache.layers)
    assert payload(cache) <= cache.memory_report().total_bytes
    fork = cache.fork()
    fork.crop(20)
    fork.batch_select_indices(torch.tensor([1]))
    cut = len(pickle.dumps(fork))
    assert fork.layers[1].state.table.pool is cache.layers[1].state.table.pool
    assert abs(cut - payload(fork) - overhead) < 1000 and cut < whole / 2


def test_embeddings_that_were_given(tmp_path: Path) -> None:
    given = {"inputs_embeds": 0.5 * model().get_input_embeddings()(PROMPT)}
    cache = filled("cl", **given)
    assert cache.layers[0].state.quantized == 128
    assert torch.equal(go_on(load(pickled(cache))), go_on(cache))


@pytest.mark.parametrize("mode", MODES)
def test_what_needs_the_model_says_so(mode: str) -> None:
    """Until it is bound: a cut in "cl" decodes from the first layer on, which is token numbers."""
    loaded = load(pickled(filled(mode)))
    with pytest.raises(ValueError, match=r"not bound to a model.*cache\.bind\(model\)"):
        loaded.layers[1].materialize(200)
    with pytest.raises(ValueError, match="bound to "), torch.no_grad():
        model()(NEXT, past_key_values=loaded)
    if mode == "cl":
        with pytest.raises(ValueError, match="not bound to a model"):
            loaded.crop(-90)
    loaded.bind(model())
    loaded.crop(-90)
    assert loaded.get_seq_length() == 110
