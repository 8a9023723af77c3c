"""A step on plain tensors, exported and compiled ahead of time."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor import aoti_compile_and_package, aoti_load_package
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from tests.compile.attention import DIM, HEADS, KV_HEADS
from torch_kvq import KVQLayer

NAMES = ("tiles", "block_table", "balance", "exact_key", "exact_value", "lengths")


class Step(torch.nn.Module):
    """Append a token and attend, with the state of a layer as buffers."""

    def __init__(self, state: tuple[Tensor, ...]) -> None:
        super().__init__()
        for name, tensor in zip(NAMES, state, strict=True):
            self.register_buffer(name, tensor)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        state = [self.get_buffer(name) for name in NAMES]
        torch.ops.kvq.quantize_tile_(*state, key, value, 4, 4)
        out, _ = torch.ops.kvq.lut_attention(query, *state)
        return out


@pytest.fixture
def step() -> Step:
    layer = KVQLayer(4, max_cache_len=448)
    layer.update(*torch.randn(2, 1, KV_HEADS, 300, DIM))
    layer.flush()
    return Step(layer.state.tensors)


def new_tokens() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(1, HEADS, 1, DIM), *torch.randn(2, 1, KV_HEADS, 1, DIM)


def assert_same_steps(step: Step, other: torch.nn.Module) -> None:
    """Over more than a tile."""
    for _ in range(70):
        arguments = new_tokens()
        assert torch.equal(other(*arguments), step(*arguments))
    assert step.lengths.tolist() == [[0, 370, 256]]


def test_exported_step(step: Step) -> None:
    program = torch.export.export(copy.deepcopy(step), new_tokens(), strict=True)
    called = [str(x.target) for x in program.graph.nodes if x.op == "call_function"]
    assert called[:2] == ["kvq.quantize_tile_.default", "kvq.lut_attention.default"]
    assert_same_steps(step, program.module())


def test_step_that_is_compiled_ahead_of_time(step: Step, tmp_path: Path) -> None:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        pytest.skip("no C++ compiler on this machine")
    program = torch.export.export(copy.deepcopy(step), new_tokens())
    quick = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    path = aoti_compile_and_package(
        program, package_path=str(tmp_path / "step.pt2"), inductor_configs=quick
    )
    assert_same_steps(step, aoti_load_package(path))
