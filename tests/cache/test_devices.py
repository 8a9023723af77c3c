"""Where tensors are is up to the keys and values, whatever device is the default."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from torch_kvq import KVQLayer

CPU = torch.device("cpu")


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 500}], ids=["grow", "static"])
def test_default_device_changes_nothing(options: dict[str, Any]) -> None:
    """As in a block that makes a model without memory."""
    key, value = torch.randn(2, 2, 2, 400, 64)
    queries, query = torch.randn(2, 4, 400, 64), torch.randn(4, 4, 1, 64)
    mask = torch.arange(400) >= torch.tensor([[0], [90]])
    rows = torch.tensor([0, 1, 1, 0])

    def run() -> list[torch.Tensor]:
        layer = KVQLayer(4, **options)
        layer.update(key, value)
        out = [layer.attend(queries, mask[:, None, None], is_causal=True)]
        layer.batch_repeat_interleave(2)
        layer.reorder_cache(rows)
        layer.crop(-30)
        layer.update(key[:1, :, :1].expand(4, -1, -1, -1), value[:1, :, :1].expand(4, -1, -1, -1))
        copies = (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), layer.fork())
        out += [held.attend(query) for held in copies]
        return [*out, *layer.materialize(300)]

    wanted = run()
    with torch.device("meta"):
        found = run()
    assert all(x.device == CPU for x in found)
    assert all(map(torch.equal, found, wanted))
