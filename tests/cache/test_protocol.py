"""What a cache asks of its layers: nothing decodes, what was moved comes back, a reset is whole."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_kvq import KVQLayer
from torch_kvq.cache.cache import KVQCache
from torch_kvq.cache.state import LayerState

SMALL: dict[str, Any] = {"quantized_start": 80, "residual_length": 10}
MODES = pytest.mark.parametrize("mode", [{}, {"max_cache_len": 700}], ids=["grow", "static"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(bits: int = 4, **options: Any) -> KVQLayer:
    """A layer of 300 tokens, the last of which lie in a tile that was cut."""
    layer = KVQLayer(bits, **SMALL, **options)
    layer.update(*normal(2, 2, 2, 350, 32))
    layer.flush()
    layer.crop(300)
    return layer


class Operators(TorchDispatchMode):
    """Names of the operators of ``torch.ops.kvq`` that a block calls."""

    def __init__(self) -> None:
        super().__init__()
        self.called: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "kvq":
            self.called.add(func._opname)
        return func(*args, **(kwargs or {}))


MUTATORS: dict[str, Callable[[KVQLayer], Any]] = {
    "update": lambda layer: layer.update(*normal(2, 2, 2, 1, 32)),
    "update_many": lambda layer: layer.update(*normal(2, 2, 2, 130, 32)),
    "crop": lambda layer: layer.crop(-50),
    "crop_to": lambda layer: layer.crop(90),
    "reorder_cache": lambda layer: layer.reorder_cache(torch.tensor([1, 1])),
    "batch_repeat_interleave": lambda layer: layer.batch_repeat_interleave(3),
    "batch_select_indices": lambda layer: layer.batch_select_indices(torch.tensor([1])),
    "reset": KVQLayer.reset,
    "fork": KVQLayer.fork,
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "offload": KVQLayer.offload,
    "prefetch": KVQLayer.prefetch,
    "memory_parts": KVQLayer.memory_parts,
    "repr": repr,
}


@MODES
@pytest.mark.parametrize("name", MUTATORS)
def test_nothing_is_decoded_or_attended(name: str, mode: dict[str, int]) -> None:
    layer = filled(**mode)
    with Operators() as operators:
        MUTATORS[name](layer)
    assert operators.called <= {"quantize_tile_", "_empty_pages"}
    assert layer.materialized == 0


def test_decoding_would_be_noticed() -> None:
    with Operators() as operators:
        filled().materialize(300)
    assert "dequantize_tile" in operators.called


@MODES
def test_reset_layer_takes_another_batch_of_another_model(mode: dict[str, int]) -> None:
    layer = filled(**mode)
    layer.reset()
    data = normal(2, 3, 4, 200, 48).bfloat16()
    layer.update(*data)
    layer.attend(normal(3, 8, 1, 48).bfloat16())
    fresh = KVQLayer(4, **SMALL, **mode)
    fresh.update(*data)
    fresh.flush()
    for got, want in zip(layer.materialize(200), fresh.materialize(200), strict=True):
        assert torch.equal(got, want)


@MODES
def test_layer_that_was_allocated_early(mode: dict[str, int]) -> None:
    """Its shapes are a proposal that the first tokens may overrule."""
    layer = KVQLayer(16, **SMALL, **mode)
    layer.lazy_initialization(*torch.zeros(2, 2, 2, 0, 32))
    assert layer.is_initialized and layer.is_empty and layer.batch_size == 2
    assert int(layer.get_seq_length()) == layer.tokens == 0
    state = layer.state
    layer.update(*normal(2, 2, 2, 200, 32))
    assert layer.state is state
    assert torch.equal(layer.materialize(200)[0], normal(2, 2, 2, 200, 32)[0])
    layer.reset()
    layer.lazy_initialization(*torch.zeros(2, 2, 2, 0, 32))
    layer.update(*normal(2, 1, 2, 200, 32))
    assert layer.batch_size == 1


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a layer think that it is on another device than the CPU; lists where it goes."""
    moves: list[str] = []
    move = KVQLayer._move

    def recorded(layer: KVQLayer, device: torch.device | str) -> None:
        moves.append(str(device))
        move(layer, "cpu")

    def device(state: LayerState) -> torch.device:
        return torch.device(moves[-1] if moves else "cuda")

    monkeypatch.setattr(KVQLayer, "_move", recorded)
    monkeypatch.setattr(LayerState, "device", property(device))
    return moves


@MODES
def test_offloaded_layer_comes_back(mode: dict[str, int], moves: list[str]) -> None:
    layer = filled(16, **mode)
    want = layer.attend(query := normal(2, 4, 1, 32))
    layer.offload()
    layer.offload()
    assert moves == ["cpu"]
    layer.prefetch()
    layer.prefetch()
    assert moves == ["cpu", "cuda"]
    assert torch.equal(layer.attend(query), want)


@MODES
def test_update_brings_an_offloaded_layer_back(mode: dict[str, int], moves: list[str]) -> None:
    layer = filled(16, **mode)
    layer.offload()
    layer.crop(-20)
    layer.reorder_cache(torch.tensor([1, 0]))
    assert moves == ["cpu"]
    layer.update(*normal(2, 2, 2, 30, 32, seed=1))
    assert moves == ["cpu", "cuda"]
    held = normal(2, 2, 2, 350, 32)[0, [1, 0], :, :280]
    want = torch.cat((held, normal(2, 2, 2, 30, 32, seed=1)[0]), 2)
    assert torch.equal(layer.materialize(310)[0], want)


@MODES
def test_attention_to_an_offloaded_layer_says_why_not(
    mode: dict[str, int], moves: list[str]
) -> None:
    """As in a cache that moves a layer away between its update and its attention."""
    layer = KVQLayer(16, **SMALL, **mode)
    query = normal(2, 4, 1, 32)
    for tokens in (100, 1):
        layer.update(*normal(2, 2, 2, tokens, 32))
        layer.offload()
        with pytest.raises(NotImplementedError, match=r"from cuda to the CPU.*offloading=True"):
            layer.attend(query)
        with pytest.raises(NotImplementedError, match="offload"):
            layer.materialize(100)
        layer.prefetch()
        layer.attend(query)
    assert int(layer.get_seq_length()) == 101


@MODES
def test_reset_of_an_offloaded_layer(mode: dict[str, int], moves: list[str]) -> None:
    layer = filled(16, **mode)
    layer.offload()
    layer.reset()
    layer.update(*normal(2, 2, 2, 200, 32))
    layer.attend(normal(2, 4, 1, 32))
    assert int(layer.get_seq_length()) == 200


@MODES
def test_a_move_takes_every_tensor_along(mode: dict[str, int]) -> None:
    layer = filled(**mode)
    there = layer.state.to("meta")
    assert {tensor.device.type for tensor in there.tensors} == {"meta"}
    assert there.table.pool.used == len({page for row in there.table.rows for page in row})
    layer.reset()
    layer.update(*normal(2, 2, 2, 5, 32))
    layer._home = torch.device("meta")
    layer.prefetch()
    assert {tensor.device.type for tensor in layer._pending} == {"meta"}


@MODES
def test_offloading_on_the_cpu_moves_nothing(mode: dict[str, int]) -> None:
    layer = filled(**mode)
    before = [tensor.data_ptr() for tensor in layer.state.tensors]
    layer.offload()
    layer.attend(normal(2, 4, 1, 32))
    layer.prefetch()
    assert [tensor.data_ptr() for tensor in layer.state.tensors] == before


def test_moved_fork_leaves_the_pool_to_the_others() -> None:
    layer = filled()
    fork = layer.fork()
    pool = layer.state.table.pool
    layer.reset()
    used = pool.used
    fork.state = fork.state.to("cpu")
    assert (used, pool.used) == (10, 0)
    assert fork.state.table.pool.used == 10


def test_reset_cache_belongs_to_no_model() -> None:
    cache = KVQCache(4, **SMALL, max_cache_len=300)
    assert not cache.holds_tokens
    cache.update(*normal(2, 1, 2, 5, 32), layer_idx=0)
    assert cache.holds_tokens
    cache.reset()
    assert not cache.holds_tokens
