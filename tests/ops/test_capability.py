"""Choice of the kernels: instruction sets, the environment variable, no compiled part."""

from __future__ import annotations

import os
import subprocess
import sys
import timeit

import pytest
import torch

import torch_kvq
from tests.conftest import TIERS

VARIABLE = "TORCH_KVQ_CPU_CAPABILITY"

USE_KERNELS = """
import torch, torch_kvq
key, value = torch.randn(2, 2, 3, 64, 64)
balance = torch_kvq.key_balance(key)
record = torch_kvq.quantize_tile(key, value, balance)
assert torch.equal(record, torch_kvq.reference.quantize_tile(key, value, balance, 4, 4))
print(*torch_kvq.cpu_capabilities().available, torch_kvq.cpu_capabilities().active)
"""

HIDE = """
import importlib.abc, sys, warnings
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch_kvq._C":
            raise ModuleNotFoundError("No module named 'torch_kvq._C'", name=name)
sys.meta_path.insert(0, Hide())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch_kvq
    import torch_kvq
ours = [str(w.message) for w in caught if "torch_kvq" in str(w.message)]
assert len(ours) == 1 and "slow" in ours[0] and "torch_kvq._C" in ours[0], ours
assert torch_kvq.cpu_capabilities() == (("reference",), "reference")
with torch_kvq.cpu_capability("reference"):
    pass
"""

needs_kernels = pytest.mark.skipif(not TIERS, reason="the compiled kernels are not built")


def python(code: str, capability: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    if capability is not None:
        environment[VARIABLE] = capability
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@needs_kernels
@pytest.mark.parametrize("name", TIERS)
def test_the_variable_forces_an_instruction_set(name: str) -> None:
    done = python(USE_KERNELS, name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*TIERS, name]


@needs_kernels
def test_without_the_variable_the_fastest_is_active() -> None:
    done = python(USE_KERNELS)
    assert done.stdout.split() == [*TIERS, TIERS[0]], done.stderr


@pytest.mark.parametrize("value", ("avx1024", "scalar,avx2", "SCALAR"))
def test_an_unknown_instruction_set_is_an_error(value: str) -> None:
    done = python("import torch_kvq", value)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ValueError") and VARIABLE in last and value in last
    assert all(name in last for name in torch_kvq.cpu_capabilities().available)


def test_it_works_without_the_compiled_part() -> None:
    done = python(HIDE + USE_KERNELS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["reference", "reference"]


def test_the_kernels_of_a_forced_instruction_set_really_run() -> None:
    """Exact sums agree on every set, so the sets are told apart by their speed."""
    if {"scalar"} >= set(TIERS):
        pytest.skip("this machine has no kernels beside the scalar ones")
    seconds = {name: _seconds(name) for name in ("scalar", TIERS[0])}
    assert seconds["scalar"] > 2 * seconds[TIERS[0]]


def _seconds(name: str) -> float:
    query, tiles = torch.randn(1, 4, 1, 128), torch.zeros(32, 1, 8640, dtype=torch.uint8)
    table, lengths = torch.arange(32).int()[None], torch.tensor([[0, 2048, 2048]]).int()
    exact = torch.zeros(1, 1, 0, 128)
    state = (tiles, table, torch.ones(1, 1, 128), exact, exact, lengths)
    with torch_kvq.cpu_capability(name):
        return min(
            timeit.repeat(
                lambda: torch_kvq.lut_attention(query, *state, sink_tokens=0), repeat=8, number=4
            )
        )


def test_the_context_manager_restores_the_active_set() -> None:
    before = torch_kvq.cpu_capabilities()
    with pytest.raises(KeyError), torch_kvq.cpu_capability(before.available[-1]):
        assert torch_kvq.cpu_capabilities().active == before.available[-1]
        raise KeyError
    assert torch_kvq.cpu_capabilities() == before
    with pytest.raises(ValueError, match="avx1024"), torch_kvq.cpu_capability("avx1024"):
        pass
