"""Tiered layers: every token counts once, the most used are near, and rows keep to themselves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.cache.tiered import (
    DIM,
    HEADS,
    SMALL,
    check,
    mask_of,
    near_tokens,
    normal,
    step,
)
from torch_kvq import TieredLayer, attention_mass

FORMATS = pytest.mark.parametrize("far", ["fp8-int4", "tile4"])


@FORMATS
@pytest.mark.parametrize(
    "steps", [[300, 1, 1, 1], [100] + [1] * 150, [40] * 8, [1] * 200, [300, 70, 1, 20, 1]]
)
def test_tokens_count_once_while_a_layer_grows(far: str, steps: list[int]) -> None:
    layer = TieredLayer(far=far, **SMALL)
    start, data, length = [0, 37, 20], normal(2, 3, HEADS, sum(steps), DIM), 0
    for tokens in steps:
        step(layer, data[:, :, :, length : length + tokens], start)
        length += tokens
        if length > 37:
            check(layer, data[:, :, :, :length], start)


@FORMATS
@pytest.mark.parametrize("seed", range(6))
def test_tokens_count_once_whatever_happens(far: str, seed: int) -> None:
    draw = random.Random(seed)
    layer = TieredLayer(far=far, **SMALL)
    start, data = [0, 37], normal(2, 2, HEADS, 260, DIM)
    step(layer, data, start)
    is_cut = False
    for number in range(25):
        action = draw.choice(["step"] * 4 + ["chunk", "draft", "crop", "select", "repeat", "fork"])
        if action in ("step", "chunk", "draft"):
            tokens = {"step": 1, "chunk": 90, "draft": 12}[action]
            new = normal(2, len(start), HEADS, tokens, DIM, seed=100 + number)
            step(layer, new, start)
            data = torch.cat((data, new), 3)
        elif action == "crop":
            length = max(data.shape[3] - draw.choice([1, 5, 30, 100]), 60)
            layer.crop(length)
            data, is_cut = data[:, :, :, :length], True
        elif action == "fork":
            other, layer = layer, layer.fork()
            step(other, normal(2, len(start), HEADS, 70, DIM, seed=7), start)
        else:
            rows = [draw.randrange(len(start)) for _ in range(draw.choice([1, 2, 3]))]
            if action == "repeat":
                rows = [row for row in range(len(start)) for _ in range(2)][:4]
                layer.batch_repeat_interleave(2)
                layer.batch_select_indices(torch.arange(len(rows)))
            else:
                layer.reorder_cache(torch.tensor(rows))
            data, start = data[:, rows], [start[row] for row in rows]
        check(layer, data, start, is_cut)


def test_rows_of_a_padded_batch_are_their_solo_runs() -> None:
    padding, steps = [0, 37, 99], [260] + [1] * 90
    data = normal(2, 3, HEADS, sum(steps), DIM)
    query = normal(3, 4, sum(steps), DIM, seed=1)
    batch, alone = TieredLayer(**SMALL), [TieredLayer(**SMALL) for _ in padding]
    length = 0
    for tokens in steps:
        now = slice(length, length + tokens)
        length += tokens
        out = step(batch, data[:, :, :, now], padding, query[:, :, now])
        for row, skipped in enumerate(padding):
            first = max(now.start, skipped)
            new = data[:, row : row + 1, :, first : now.stop]
            own = step(alone[row], new, [0], query[row : row + 1, :, first : now.stop])
            torch.testing.assert_close(out[row : row + 1, :, first - now.start :], own)
    for row, layer in enumerate(alone):
        assert batch.state.lengths[row, 2] == layer.state.lengths[0, 2]
        for head in range(HEADS):
            assert sorted(near_tokens(batch.state, row, head)) == sorted(
                near_tokens(layer.state, 0, head)
            )


def test_a_prompt_is_tiered_by_the_mass_of_its_last_queries() -> None:
    layer = TieredLayer(observed_queries=8, **SMALL)
    data, query = normal(2, 1, HEADS, 300, DIM), 2 * normal(1, 4, 300, DIM, seed=1)
    layer.update(*data)
    layer.attend(query, is_causal=True)
    mass = attention_mass(query[:, :, -8:], data[0], is_causal=True)[0][0]
    far = int(layer.state.lengths[0, 2])
    count = layer.options.chosen(300, far)
    assert count == 75 - 4 - 10
    for head in range(HEADS):
        expected = (mass[head, 4 : 4 + far].topk(count).indices + 4).tolist()
        chosen = [t for t in near_tokens(layer.state, 0, head) if 4 <= t < 4 + far]
        assert sorted(chosen) == sorted(expected)


def test_what_is_used_stays_and_the_rest_leaves() -> None:
    """One token of the window is attended to by every step, the others are not."""
    layer = TieredLayer(**SMALL)
    data = normal(2, 1, HEADS, 500, DIM)
    loved = 310
    query = 3 * data[0][:, :, loved : loved + 1].repeat_interleave(2, 1)
    step(layer, data[:, :, :, :300], [0])
    for t in range(300, 450):
        step(layer, data[:, :, :, t : t + 1], [0], query)
    assert layer.state.lengths[0, 2] > loved
    for head in range(HEADS):
        assert loved in near_tokens(layer.state, 0, head)


def test_a_draft_that_is_taken_back_leaves_no_trace() -> None:
    data, query = normal(2, 1, HEADS, 400, DIM), normal(1, 4, 1, DIM, seed=1)
    plain, drafted = TieredLayer(**SMALL), TieredLayer(**SMALL)
    for layer in (plain, drafted):
        step(layer, data[:, :, :, :300], [0])
    for t in range(300, 380):
        if t % 9 == 0:
            step(drafted, normal(2, 1, HEADS, 11, DIM, seed=t), [0])
            drafted.crop(-11)
        for layer in (plain, drafted):
            step(layer, data[:, :, :, t : t + 1], [0], query)
    assert torch.equal(plain.state.lengths, drafted.state.lengths)
    check(drafted, data[:, :, :, :380], [0])


def test_memory_is_given_back() -> None:
    layer = TieredLayer(**SMALL)
    step(layer, normal(2, 1, HEADS, 2000, DIM), [0])
    pool = layer.state.table.pool
    full = pool.used
    fork = layer.fork()
    assert pool.used == full
    layer.crop(100)
    assert pool.used == full
    del fork
    assert pool.used == 64 // 64
    layer.reset()
    assert layer.is_empty and pool.used == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"near_ratio": 1.5}, ValueError, "near_ratio must be from 0 to 1, got 1.5"),
        ({"near_ratio": "a"}, TypeError, "near_ratio must be a number"),
        ({"far": "int8"}, ValueError, "far must be 'fp8-int4' or 'tile4', got 'int8'"),
        ({"observed_queries": 0}, ValueError, "observed_queries must be at least 1, got 0"),
        ({"window": -1}, ValueError, "window must be at least 0, got -1"),
    ],
)
def test_options_are_checked(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        TieredLayer(**options)


def test_other_tokens_than_the_layer_holds() -> None:
    layer = TieredLayer(**SMALL)
    step(layer, normal(2, 2, HEADS, 300, DIM), [0, 0])
    for shape in [(1, HEADS, 1, DIM), (2, HEADS, 1, 64), (2, 1, 1, DIM)]:
        with pytest.raises(ValueError, match="the layer holds batch 2, 2 kv heads"):
            layer.update(*normal(2, *shape))
    assert layer.get_seq_length() == 300
    query = normal(2, 4, 1, DIM)
    assert layer.attend(query, mask_of([0, 0], 1, 300)).isfinite().all()
