"""Far tokens that suddenly matter come back exactly, and a lost archive costs no more than that."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cache.tiered import DIM, HEADS, check, near_tokens, normal, step
from torch_kvq import _extension
from torch_kvq.cache.tiered_cache import TieredCache
from torch_kvq.cache.tiered_layer import TieredLayer

if not _extension.is_compiled:
    pytest.skip("the compiled part is not built", allow_module_level=True)

SMALL: dict[str, Any] = {"quantized_start": 80, "window": 10, "near_ratio": 0.1}


def filled(data: Tensor, start: list[int], **options: Any) -> tuple[TieredCache, TieredLayer]:
    """A cache of one layer after a prompt."""
    cache = TieredCache(**{**SMALL, "promote": "sync", "archive_in_memory": True, **options})
    cache._add_layers(0, 0)
    layer = cache.layers[0]
    step(layer, data, start)
    return cache, layer


def forgotten(layer: TieredLayer, row: int = 0) -> int:
    """A token that no head has near."""
    near = {token for head in range(HEADS) for token in near_tokens(layer.state, row, head)}
    return next(token for token in range(100, 300) if token not in near)


def attends_to(data: Tensor, positions: list[int]) -> Tensor:
    """Queries of every row that have nearly all their weight on the token at a position."""
    keys = torch.stack([data[0, row, :, place] for row, place in enumerate(positions)])
    keys = keys / keys.norm(dim=-1, keepdim=True)
    return (60 * keys).repeat_interleave(2, 1).unsqueeze(2)


def exact(query: Tensor, data: Tensor, start: list[int]) -> Tensor:
    hidden = torch.arange(data.shape[3]) < torch.tensor(start).view(-1, 1, 1, 1)
    return F.scaled_dot_product_attention(query, *data, ~hidden, enable_gqa=True)


@pytest.mark.parametrize("far", ["fp8-int4", "tile4"])
def test_a_promoted_token_is_exact(far: str) -> None:
    start, data = [0, 37], normal(2, 2, HEADS, 600, DIM)
    cache, layer = filled(data[:, :, :, :500], start, far=far)
    plain, unpromoted = filled(
        data[:, :, :, :500], start, far=far, promote=False, archive_in_memory=False
    )
    tokens = [forgotten(layer, row) for row in range(2)]
    query = attends_to(data, [t + s for t, s in zip(tokens, start, strict=True)])
    cosines = []
    for length in (501, 502):
        new = data[:, :, :, length - 1 : length]
        out, bare = step(layer, new, start, query), step(unpromoted, new, start, query)
        want = exact(query, data[:, :, :, :length], start)
        cosines.append([F.cosine_similarity(x, want, dim=-1).min() for x in (out, bare)])
        check(layer, data[:, :, :, :length], start)
    assert cosines[1][0] >= 0.9999 > cosines[1][1]
    for row, token in enumerate(tokens):
        for head in range(HEADS):
            assert token in near_tokens(layer.state, row, head)
    assert cache.promoted >= 4 and plain.promoted == 0


@pytest.mark.parametrize("promote", ["sync", True])
def test_tokens_count_once_while_some_come_back(promote: Any) -> None:
    start, data = [0, 37], normal(2, 2, HEADS, 700, DIM)
    cache, layer = filled(data[:, :, :, :400], start, promote=promote, cooldown=1)
    length = 400
    for number in range(120):
        places = [50 + 7 * number % 300, 60 + 11 * number % 300]
        new = data[:, :, :, length : length + 1]
        length += 1
        step(layer, new, start, attends_to(data, places))
        if number % 40 == 20:
            length -= 30
            layer.crop(length)
        if number % 40 == 30:
            layer.reorder_cache(torch.tensor([1, 0]))
            data, start = data[:, [1, 0]], start[::-1]
        if number % 10 == 0:
            check(layer, data[:, :, :, :length], start)
    assert cache.promoted > 20


@pytest.mark.parametrize("length", [450, 130, 20])
def test_a_cut_into_a_tile_brings_exact_tokens_back(length: int) -> None:
    start, data = [0, 37], normal(2, 2, HEADS, 600, DIM)
    _, layer = filled(data, start)
    _, plain = filled(data, start, promote=False, archive_in_memory=False)
    for held, is_cut in ((layer, False), (plain, True)):
        held.crop(length)
        start = [min(first, length) for first in start]
        check(held, data[:, :, :, :length], start, is_cut)
    assert torch.equal(layer.state.lengths, plain.state.lengths)


def test_synchronous_promotion_repeats() -> None:
    data = normal(2, 1, HEADS, 500, DIM)
    outputs = []
    for _ in range(2):
        _, layer = filled(data[:, :, :, :400], [0])
        outputs.append(
            [
                step(layer, data[:, :, :, t : t + 1], [0], attends_to(data, [t - 300]))
                for t in range(400, 450)
            ]
        )
    assert all(map(torch.equal, *outputs))


def test_a_full_near_tier_gives_up_its_least_used_token() -> None:
    data = normal(2, 1, HEADS, 600, DIM)
    cache, layer = filled(data[:, :, :, :500], [0], cooldown=1)
    room = layer.state.kept
    for number in range(2 * room):
        place = 60 + 5 * number % 400
        step(layer, data[:, :, :, 500:501], [0], attends_to(data, [place]))
        layer.crop(500)
    assert layer.state.kept == room and cache.promoted > room
    for head in range(HEADS):
        assert {0, 1, 2, 3} <= set(near_tokens(layer.state, 0, head))


def test_a_lost_archive_turns_promotion_off(monkeypatch: pytest.MonkeyPatch) -> None:
    start, data = [0], normal(2, 1, HEADS, 600, DIM)
    cache, layer = filled(data[:, :, :, :500], start, archive_in_memory=False)
    ops = torch.ops.kvq
    cache.promotion.archive.flush()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _break_file(cache)
        for t in range(500, 600):
            query = attends_to(data, [t - 300])
            out = step(layer, data[:, :, :, t : t + 1], start, query)
            want = exact(query, data[:, :, :, : t + 1], start)
            assert F.cosine_similarity(out, want, dim=-1).min() > 0.99
    assert ops._archive_error(cache.promotion.archive._handle)
    assert [w.category for w in caught] == [RuntimeWarning]
    assert cache.promotion.archive.failed
    check(layer, data, start)


def _break_file(cache: TieredCache) -> None:
    """Let the disk be full: the process may not write files of any size."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        layer = cache.promotion.archive.layer(1)
        layer.append(*normal(2, 1, HEADS, 640, DIM))
        cache.promotion.archive.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("how", ["fork", "deepcopy"])
def test_copies_have_an_archive_of_their_own(how: str) -> None:
    data = normal(2, 1, HEADS, 600, DIM)
    cache, layer = filled(data[:, :, :, :500], [0])
    other = cache.fork() if how == "fork" else copy.deepcopy(cache)
    layer.reset()
    copied = other.layers[0]
    token = forgotten(copied)
    for t in (500, 501):
        step(copied, data[:, :, :, t : t + 1], [0], attends_to(data, [token]))
    assert token in near_tokens(copied.state, 0, 0)
    assert other.promotion is not cache.promotion
    check(copied, data[:, :, :, :502], [0])


def test_a_pickled_cache_goes_on_without() -> None:
    data = normal(2, 1, HEADS, 600, DIM)
    cache, _ = filled(data[:, :, :, :500], [0])
    other = pickle.loads(pickle.dumps(cache))
    assert other.promotion is None and other.layers[0].promotion is None
    step(other.layers[0], data[:, :, :, 500:501], [0])
    check(other.layers[0], data[:, :, :, :501], [0])
    assert cache.promotion is not None


def test_report_by_tier() -> None:
    data = normal(2, 1, HEADS, 600, DIM)
    cache, _ = filled(data, [0])
    report = cache.memory_report()
    assert report.parts["archive"] == cache.promotion.archive.nbytes >= data.numel() * 4
    assert report.total_bytes == sum(report.parts.values()) and report.disk_bytes == 0
    cache, _ = filled(data, [0], archive_in_memory=False)
    cache.promotion.archive.flush()
    report = cache.memory_report()
    assert report.disk_bytes > 0 and "in a file" in str(report)


def test_an_archive_with_a_path_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    cache, _ = filled(normal(2, 1, HEADS, 600, DIM), [0], archive=path, archive_in_memory=False)
    cache.close()
    assert path.stat().st_size >= 2 * HEADS * 600 * DIM * 4
    assert cache.promotion is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"promote": "async"}, "promote must be True, False or 'sync', got 'async'"),
        ({"promote": False, "archive": "a"}, "promote=False keeps no archive, got archive='a'"),
        ({"archive": "a", "archive_in_memory": True}, "an archive in memory has no path"),
        ({"cooldown": -1}, "cooldown must"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TieredCache(**options)


def test_the_map_shows_tiers() -> None:
    data = normal(2, 1, HEADS, 600, DIM)
    cache, layer = filled(data[:, :, :, :500], [0])
    token = forgotten(layer)
    for t in (500, 501):
        step(layer, data[:, :, :, t : t + 1], [0], attends_to(data, [token]))
    tiers = cache.tier_map(0).tiers
    assert tiers.shape == (HEADS, 502) and tiers[:, token].tolist() == [2, 2]
    for head in range(HEADS):
        assert tiers[head].nonzero().flatten().tolist() == sorted(near_tokens(layer.state, 0, head))
    for layer_index, row in [(1, 0), (0, 1)]:
        with pytest.raises(ValueError, match="must"):
            cache.plot_tiers(layer_index, row)


def test_the_map_is_drawn() -> None:
    pytest.importorskip("matplotlib").use("agg")
    cache, _ = filled(normal(2, 1, HEADS, 500, DIM), [0])
    figure = cache.plot_tiers(0)
    (axes,) = figure.axes
    assert axes.get_xlabel() == "token" and axes.get_ylabel() == "KV head"
    assert axes.images[0].get_array().shape == (HEADS, 500)


@pytest.mark.parametrize("promote", ["sync", True])
def test_a_cache_that_was_cut_to_nothing_takes_another_batch(promote: Any) -> None:
    cache, layer = filled(normal(2, 1, HEADS, 300, DIM), [0], promote=promote)
    cache.crop(-300)
    data = normal(2, 3, HEADS, 200, DIM)
    step(layer, data, [0, 0, 0])
    archive = cache.promotion.archive.layer(0)
    assert (archive.rows, archive.tokens) == (3, 200)
    check(layer, data, [0, 0, 0])


def test_updates_without_attention_are_archived_once() -> None:
    data = normal(2, 1, HEADS, 400, DIM)
    cache = TieredCache(archive_in_memory=True)
    for part in data.split([150, 150, 1, 99], 3):
        cache.update(*part, layer_idx=0)
    assert cache.promotion.archive.layer(0).tokens == cache.get_seq_length() == 400
