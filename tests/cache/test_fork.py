"""Forks share full pages and nothing else, and give back what they hold."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_kvq import KVQLayer
from torch_kvq.cache.cache import KVQCache

SMALL: dict[str, Any] = {"quantized_start": 80, "residual_length": 10}
MODES = pytest.mark.parametrize("mode", [{}, {"max_cache_len": 700}], ids=["grow", "static"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(bits: int = 16, tokens: int = 300, **options: Any) -> KVQLayer:
    layer = KVQLayer(bits, **SMALL, **options)
    layer.update(*normal(2, 2, 2, tokens, 32))
    layer.flush()
    return layer


def continued(layer: KVQLayer, seed: int, tokens: int = 150) -> Tensor:
    """Append other tokens, pack and decode all."""
    layer.update(*normal(2, 2, 2, tokens, 32, seed=seed))
    layer.flush()
    layer.state.pack()
    return torch.stack(layer.materialize(int(layer.get_seq_length())))


def pages_of(layer: KVQLayer) -> set[int]:
    return {page for row in layer.state.table.rows for page in row}


@MODES
@pytest.mark.parametrize("cut", [0, 100], ids=["full", "partial"])
def test_each_goes_its_own_way(cut: int, mode: dict[str, int]) -> None:
    """Also where both complete a page that a cut left partial."""
    layer = filled(**mode)
    layer.crop(300 - cut)
    forks = [layer, layer.fork(), layer.fork().fork()]
    decoded = [continued(fork, seed) for seed, fork in enumerate(forks, 1)]
    for seed, (fork, got) in enumerate(zip(forks, decoded, strict=True), 1):
        want = torch.cat(
            (normal(2, 2, 2, 300, 32)[:, :, :, : 300 - cut], normal(2, 2, 2, 150, 32, seed=seed)), 3
        )
        assert torch.equal(got, want)
        assert torch.equal(torch.stack(fork.materialize(450 - cut)), want)


def test_a_fork_copies_no_full_page() -> None:
    layer = KVQLayer(4)
    layer.update(*normal(2, 1, 2, 8192, 64))
    layer.flush()
    fork = layer.fork()
    assert fork.state.table.pool is layer.state.table.pool
    assert pages_of(fork) == pages_of(layer)
    own = sum(tensor.nbytes for tensor in fork.state.tensors[1:])
    assert own < 0.12 * sum(layer.memory_parts().values())
    assert fork.memory_parts()["tiles"] == layer.memory_parts()["tiles"]


@MODES
def test_prompt_that_waits_for_its_attention(mode: dict[str, int]) -> None:
    """Each attention shows the padding to its own layer."""
    layer = KVQLayer(16, **SMALL, **mode)
    layer.update(*normal(2, 2, 2, 120, 32))
    fork = layer.fork()
    mask = torch.ones(120, 120, dtype=torch.bool).tril() & (torch.arange(120) >= 30)
    fork.attend(normal(2, 4, 120, 32), mask)
    layer.flush()
    assert fork.state.lengths[:, 0].tolist() == [30, 30]
    assert layer.state.lengths[:, 0].tolist() == [0, 0]


def test_growth_by_one_fork_reaches_all() -> None:
    """The tiles that the pool had before are freed, and read by nobody."""
    layer = filled()
    fork = layer.fork()
    query = normal(2, 4, 1, 32)
    want = layer.attend(query)
    before = weakref.ref(layer.state.table.pool.tiles)
    continued(fork, seed=1, tokens=400)
    assert before() is None
    assert layer.state.tensors[0] is fork.state.tensors[0]
    assert torch.equal(layer.attend(query), want)


@pytest.mark.parametrize("end", ["reset", "crop", "delete", "replace"])
def test_pages_of_a_fork_are_given_back(end: str) -> None:
    layer = filled()
    pool, used = layer.state.table.pool, layer.state.table.pool.used
    fork = layer.fork()
    continued(fork, seed=1)
    assert pool.used > used
    if end == "reset":
        fork.reset()
    elif end == "crop":
        fork.crop(-450)
    elif end == "replace":
        fork.state = None
    else:
        del fork
    assert pool.used == used
    assert torch.equal(torch.stack(layer.materialize(300)), normal(2, 2, 2, 300, 32))


def test_a_fork_outlives_its_origin() -> None:
    layer = filled()
    pool = layer.state.table.pool
    fork = layer.fork()
    del layer
    assert pool.used == len(pages_of(fork))
    assert torch.equal(continued(fork, 1)[:, :, :, :300], normal(2, 2, 2, 300, 32))
    del fork
    assert pool.used == 0


def test_pages_of_a_reference_cycle_are_given_back() -> None:
    layer = filled()
    fork = layer.fork()
    pool, used = layer.state.table.pool, layer.state.table.pool.used
    continued(fork, 1)
    fork.cycle = fork
    del fork
    gc.collect()
    assert pool.used == used


COPIES = pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))], ids=["copy", "pickle"]
)


@COPIES
def test_copy_of_a_fork_takes_its_own_pages_alone(make: Callable[[KVQLayer], KVQLayer]) -> None:
    layer = filled()
    fork, other = layer.fork(), layer.fork()
    continued(other, 1, tokens=600)
    fork.reorder_cache(torch.tensor([1, 1]))
    pool = fork.state.table.pool
    counts = list(pool._counts)
    clone = make(fork)
    assert pool._counts == counts
    assert clone.state.table.pool is not pool
    assert clone.state.table.pool.used == len(pages_of(fork)) == 4 < pool.used
    assert clone.state.table.pool.tiles.shape[0] == 4
    assert torch.equal(continued(clone, 2), continued(fork, 2))
    del clone
    assert torch.equal(continued(other, 3)[:, :, :, :300], normal(2, 2, 2, 300, 32))


@COPIES
def test_copies_of_forks_together(make: Callable[[Any], Any]) -> None:
    layer = filled()
    clones = make([layer, layer.fork()])
    for seed, clone in enumerate(clones):
        assert torch.equal(continued(clone, seed)[:, :, :, :300], normal(2, 2, 2, 300, 32))
    pool = clones[0].state.table.pool
    del clones, clone
    assert pool.used == 0


@MODES
@COPIES
def test_copies_keep_what_is_packed(make: Callable[[Any], Any], mode: dict[str, int]) -> None:
    layer = filled(4, **mode)
    layer.crop(-100)
    clone = make(layer)
    assert torch.equal(continued(clone, 1), continued(layer, 1))
    assert clone.is_compileable == layer.is_compileable


@pytest.mark.parametrize("make", [copy.deepcopy, KVQLayer.fork, pickle.dumps])
@MODES
def test_copied_in_inference_mode_and_used_outside(make: Any, mode: dict[str, int]) -> None:
    layer = filled(**mode)
    layer.crop(-100)
    with torch.inference_mode():
        clone = make(layer)
        if isinstance(clone, bytes):
            clone = pickle.loads(clone)
    continued(clone, 1)
    clone.crop(-100)
    clone.reorder_cache(torch.tensor([1, 0]))
    clone.reset()
    assert torch.equal(continued(clone, 2, tokens=200), normal(2, 2, 2, 200, 32, seed=2))


def test_static_fork_is_a_whole_copy() -> None:
    layer = filled(max_cache_len=700)
    addresses = [tensor.data_ptr() for tensor in layer.state.tensors]
    fork = layer.fork()
    assert fork.state.table.pool is not layer.state.table.pool
    continued(fork, 1)
    assert [tensor.data_ptr() for tensor in layer.state.tensors] == addresses
    assert fork.is_compileable


def test_fork_of_a_layer_without_tokens() -> None:
    layer = KVQLayer(16, **SMALL)
    fork = layer.fork()
    continued(fork, 1)
    assert layer.get_seq_length() == 0 and fork.get_seq_length() == 150


def test_fork_of_a_cache() -> None:
    cache = KVQCache(4, **SMALL)
    for layer_idx in range(2):
        cache.update(*normal(2, 1, 2, 200, 32), layer_idx=layer_idx)
    fork = cache.fork()
    for layer_idx in range(2):
        fork.update(*normal(2, 1, 2, 7, 32), layer_idx=layer_idx)
    fork.layers.append(KVQLayer())
    assert (cache.get_seq_length(), fork.get_seq_length()) == (200, 207)
    assert (len(cache), len(fork)) == (2, 3)
    assert fork.options is cache.options
