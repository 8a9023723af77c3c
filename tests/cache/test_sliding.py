"""Layers with a sliding window give up the pages that have left it, and nothing else."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_kvq import KVQLayer
from torch_kvq.formats import TILE_TOKENS

WINDOW = 150
HEADS, KV_HEADS, DIM = 4, 2, 32


def tokens(count: int, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    key, value = torch.randn(2, batch, KV_HEADS, count, DIM, generator=generator)
    return key, value


def layers(bits: int = 4, **options: Any) -> tuple[KVQLayer, KVQLayer]:
    """A layer that gives pages up and one that keeps all."""
    return KVQLayer(bits, sliding_window=WINDOW, **options), KVQLayer(bits, **options)


def feed(layer: KVQLayer, key: Tensor, value: Tensor, steps: tuple[int, ...]) -> list[Tensor]:
    """Update and attend with these numbers of tokens; what attention gives each time."""
    out, done = [], 0
    for step in steps:
        part = slice(done, done + step)
        done += step
        layer.update(key[:, :, part], value[:, :, part])
        query = key[:, :, part].repeat_interleave(HEADS // KV_HEADS, 1)
        out.append(layer.attend(query, is_causal=True, sliding_window=WINDOW))
    return out


def pages(layer: KVQLayer) -> int:
    assert layer.state is not None
    return layer.state.table.pool.used


@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("steps", [(1500, *(1,) * 140), (300,) * 5, (1,) * 700, (700, 5, 90, 1, 1)])
def test_attention_is_that_of_a_layer_with_all_pages(bits: int, steps: tuple[int, ...]) -> None:
    key, value = tokens(sum(steps), batch=2)
    sliding, whole = layers(bits)
    for mine, wanted in zip(
        feed(sliding, key, value, steps), feed(whole, key, value, steps), strict=True
    ):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=2e-6)
    assert pages(sliding) < pages(whole)


def test_window_applies_without_being_asked_for() -> None:
    key, value = tokens(600)
    sliding, whole = layers()
    feed(sliding, key, value, (600,))
    feed(whole, key, value, (600,))
    query = torch.randn(1, HEADS, 1, DIM)
    assert torch.equal(sliding.attend(query), whole.attend(query, sliding_window=WINDOW))
    assert torch.equal(
        sliding.attend(query, sliding_window=99), whole.attend(query, sliding_window=99)
    )


@pytest.mark.parametrize("steps", [(9000,), (1000,) * 9, (800, *(1,) * 3000)])
def test_memory_does_not_grow_with_the_context(steps: tuple[int, ...]) -> None:
    key, value = tokens(sum(steps))
    sliding, _ = layers()
    feed(sliding, key, value, steps)
    visible = -(-WINDOW // TILE_TOKENS) + 1
    assert pages(sliding) <= visible + 1
    assert sliding.state is not None
    assert (
        len(sliding.state.table.pool.tiles) <= visible + 1 + max(map(min, steps[:1], (1000,))) / 32
    )


def test_rows_are_their_solo_runs() -> None:
    key, value = tokens(900, batch=2)
    padding = 600
    mask = torch.ones(2, 1, 1, 900, dtype=torch.bool)
    mask[0, :, :, :padding] = False
    together, _ = layers()
    together.update(key, value)
    together.attend(torch.zeros(2, HEADS, 900, DIM), mask, is_causal=True)
    alone, _ = layers()
    feed(alone, key[:1, :, padding:], value[:1, :, padding:], (900 - padding,))
    query = torch.randn(2, HEADS, 1, DIM)
    assert torch.equal(together.attend(query, mask)[:1], alone.attend(query[:1]))


def test_rows_come_and_go() -> None:
    key, value = tokens(900, batch=2)
    sliding, whole = layers()
    for layer in (sliding, whole):
        feed(layer, key, value, (890, *(1,) * 10))
        layer.batch_repeat_interleave(2)
        layer.reorder_cache(torch.tensor([3, 0, 0, 2]))
        layer.batch_select_indices(torch.tensor([1, 0, 3]))
    query = torch.randn(3, HEADS, 1, DIM)
    wanted = whole.attend(query, sliding_window=WINDOW)
    for layer in (sliding, copy.deepcopy(sliding), pickle.loads(pickle.dumps(sliding))):
        assert torch.equal(layer.attend(query), wanted)
    fork = sliding.fork()
    new = tokens(100, batch=3, seed=1)
    mine, other = feed(fork, *new, (100,))[0], feed(whole, *new, (100,))[0]
    torch.testing.assert_close(mine, other, rtol=0, atol=2e-6)
    assert torch.equal(sliding.attend(query), wanted)


def test_few_tokens_can_be_removed() -> None:
    key, value = tokens(1000)
    sliding, whole = layers()
    for layer in (sliding, whole):
        feed(layer, key, value, (940, *(1,) * 60))
        layer.crop(-40)
    query = torch.randn(1, HEADS, 1, DIM)
    assert torch.equal(sliding.attend(query), whole.attend(query, sliding_window=WINDOW))


def test_what_was_given_up_cannot_come_back() -> None:
    key, value = tokens(1000)
    sliding, _ = layers()
    feed(sliding, key, value, (1000,))
    query = torch.randn(1, HEADS, 1, DIM)
    before = sliding.attend(query)
    with pytest.raises(IndexError, match="500 positions.*sliding window of 150"):
        sliding.crop(-500)
    with pytest.raises(ValueError, match="300 queries.*sliding window of 150"):
        sliding.attend(torch.randn(1, HEADS, 300, DIM), is_causal=True)
    assert torch.equal(sliding.attend(query), before)
    sliding.reset()
    assert sliding.get_seq_length() == 0


def test_decoding_gives_zeros_for_what_was_given_up() -> None:
    key, value = tokens(1000)
    sliding, whole = layers(16)
    for layer in (sliding, whole):
        feed(layer, key, value, (1000,))
    decoded = sliding.materialize(1000)
    for mine, wanted in zip(decoded, whole.materialize(1000), strict=True):
        assert torch.equal(mine[:, :, -WINDOW:], wanted[:, :, -WINDOW:])
        assert mine.isfinite().all()
        assert not mine[:, :, 10:500].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 128}, "sliding_window must exceed residual_length \\+ 64.*128.*64"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, got 0"),
        ({"sliding_window": 400, "max_cache_len": 800}, "max_cache_len.*sliding_window"),
    ],
)
def test_windows_that_cannot_be(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVQLayer(4, **options)
