"""What the documentation shows of caches runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.models import tiny_model, token_ids

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")


@pytest.mark.parametrize(
    ("document", "cache"),
    [
        ("README.md", "TieredCache"),
        ("docs/tiers.md", "TieredCache"),
        ("README.md", "XQuantCache"),
        ("docs/xquant.md", "XQuantCache"),
    ],
)
def test_recipe(document: str, cache: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_KVQ_CACHE", str(tmp_path))
    text = (Path(__file__).parents[2] / document).read_text()
    recipes = re.findall(r"```python\n(.*?)```", text, re.S)
    (recipe,) = [part for part in recipes if f"import {cache}" in part]
    if "plot_tiers" in recipe:
        pytest.importorskip("matplotlib")
    ids = token_ids(1, 300)
    inputs = {"input_ids": ids, "max_new_tokens": 3, "do_sample": False}
    names: dict[str, Any] = {"model": tiny_model("llama"), "inputs": inputs}
    exec(recipe, names)
    assert type(names["cache"]).__name__ == cache
    assert names["cache"].get_seq_length() == ids.shape[1] + 2
    assert names["cache"].materialized == 0
