"""Tiered layers with a sliding window give up what has left it, near or far, and nothing else."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cache.tiered import DIM, HEADS, check_counted_once, check_denominator, normal
from torch_kvq import TieredLayer, _extension
from torch_kvq.cache.tiered_cache import TieredCache
from torch_kvq.formats import TILE_TOKENS

WINDOW = 150
SMALL: dict[str, Any] = {"quantized_start": 80, "window": 10, "near_ratio": 1.0}
FORMATS = pytest.mark.parametrize("far", ["fp8-int4", "tile4"])


def feed(layer: Any, data: Tensor, steps: tuple[int, ...], start: tuple[int, ...] = ()) -> None:
    """Update and attend; outputs are those of exact attention where all tokens are near."""
    done, before = 0, int(layer.get_seq_length())
    start = start or (0,) * data.shape[1]
    for step in steps:
        done += step
        layer.update(*data[:, :, :, before + done - step : before + done])
        query = normal(data.shape[1], 2 * HEADS, step, DIM, seed=before + done)
        mask = mask_of(start, step, before + done)
        out = layer.attend(query, mask)
        if layer.options.near_ratio == 1.0:
            torch.testing.assert_close(out, exact(query, data, mask), rtol=1e-4, atol=1e-4)
        if not layer.state.placed:
            continue
        check_counted_once(layer.state)
        check_denominator(layer, list(start))


def mask_of(start: tuple[int, ...], queries: int, length: int) -> Tensor:
    """Causal, without padding; the layer knows its window by itself."""
    position = torch.arange(length)
    causal = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    return (causal & (position >= torch.tensor(start).view(-1, 1, 1))).unsqueeze(1)


def exact(query: Tensor, data: Tensor, mask: Tensor) -> Tensor:
    queries, length = mask.shape[2:]
    mask = mask & torch.ones(queries, length, dtype=torch.bool).triu(length - queries - WINDOW + 1)
    key, value = (x.repeat_interleave(2, 1) for x in data[:, :, :, :length])
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)
    return out.masked_fill(~mask.any(-1, keepdim=True), 0.0)


def given_up(layer: Any) -> int:
    held = [len(pages) for pages in layer.state.table.rows]
    return sum(held) - layer.state.table.pool.used


@FORMATS
@pytest.mark.parametrize("steps", [(900, *(1,) * 140), (300,) * 4, (1,) * 500, (500, 5, 90, 1, 1)])
@pytest.mark.parametrize("near_ratio", [1.0, 0.25])
def test_what_is_in_the_window_counts_once(
    near_ratio: float, steps: tuple[int, ...], far: str
) -> None:
    layer = TieredLayer(far=far, sliding_window=WINDOW, **{**SMALL, "near_ratio": near_ratio})
    feed(layer, normal(2, 2, HEADS, sum(steps), DIM), steps)
    assert given_up(layer) > 0


def test_rows_are_placed_by_their_own_tokens() -> None:
    layer = TieredLayer(sliding_window=WINDOW, **SMALL)
    steps = (500, 1, 1, 90, *(1,) * 130)
    feed(layer, normal(2, 3, HEADS, sum(steps), DIM), steps, (0, 333, 70))
    freed = [pages.count(-1) for pages in layer.state.table.rows]
    assert freed[0] > freed[2] > freed[1] > 0


@pytest.mark.parametrize("steps", [(4000,), (1000,) * 4, (800, *(1,) * 1500)])
def test_memory_does_not_grow_with_the_context(steps: tuple[int, ...]) -> None:
    layer = TieredLayer(sliding_window=WINDOW, **SMALL)
    data, length = normal(2, 1, HEADS, sum(steps), DIM), 0
    for step in steps:
        layer.update(*data[:, :, :, length : length + step])
        layer.attend(normal(1, 2 * HEADS, step, DIM), is_causal=True)
        length += step
    state = layer.state
    assert state.table.pool.used <= -(-WINDOW // TILE_TOKENS) + 2
    assert state.near_key.shape[2] < 3 * WINDOW + 2 * TILE_TOKENS
    if len(steps) == 1:
        assert len(state.table.pool.tiles) == state.table.pool.used


def test_rows_come_and_go() -> None:
    data = normal(2, 2, HEADS, 700, DIM)
    layer = TieredLayer(sliding_window=WINDOW, **SMALL)
    feed(layer, data[:, :, :, :600], (600,))
    layer.reorder_cache(torch.tensor([1, 0, 1]))
    data = data[:, [1, 0, 1]]
    pool = layer.state.table.pool
    copies = [layer.fork(), copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    used = pool.used
    for each in (layer, *copies):
        feed(each, data, (1,) * 70)
    del layer, each, copies
    assert used > 0 and pool.used == 0


def test_few_tokens_can_be_removed_and_not_more() -> None:
    data = normal(2, 1, HEADS, 700, DIM)
    layer = TieredLayer(sliding_window=WINDOW, **SMALL)
    feed(layer, data[:, :, :, :640], (580, *(1,) * 60))
    layer.crop(-40)
    feed(layer, data, (1,) * 100)
    with pytest.raises(IndexError, match="400 positions.*sliding window of 150"):
        layer.crop(400)
    with pytest.raises(ValueError, match="300 queries.*sliding window of 150"):
        layer.attend(normal(1, 2 * HEADS, 300, DIM), is_causal=True)
    key, _ = layer.materialize(700)
    assert torch.equal(key[:, :, -WINDOW:], data[0, :, :, -WINDOW:])
    assert layer.state.first_position > 300
    assert not key[:, :, 4 : layer.state.first_position].any()


@pytest.mark.skipif(not _extension.is_compiled, reason="an archive is compiled")
@pytest.mark.parametrize("promote", ["sync", True])
def test_tokens_come_back_while_they_are_in_the_window(promote: Any) -> None:
    options = {"quantized_start": 80, "window": 10, "near_ratio": 0.1, "cooldown": 1}
    cache = TieredCache(promote=promote, margin=-50.0, archive_in_memory=True, **options)
    cache.options = cache.options.with_sliding_window(WINDOW)
    data = normal(2, 2, HEADS, 600, DIM)
    cache._add_layers(0, 0)
    (layer,) = cache.layers
    feed(layer, data[:, :, :, :500], (300, *(1,) * 200), (0, 40))
    assert cache.promoted > 20
    layer.crop(-30)
    feed(layer, data, (1,) * 60, (0, 40))
    archive = cache.promotion.archive.layer(0)
    assert (archive.rows, archive.tokens) == (2, 530)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 96}, "sliding_window must exceed window \\+ 64.*96.*window=32"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
    ],
)
def test_windows_that_cannot_be(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TieredLayer(**options)
