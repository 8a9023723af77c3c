"""Loading of the compiled kernels and choice of their instruction set."""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator
from typing import NamedTuple

import torch

_VARIABLE = "TORCH_KVQ_CPU_CAPABILITY"
_library = torch.library.Library("kvq", "FRAGMENT")
_library.define("_cpu_capabilities() -> str")
_library.define("_set_cpu_capability(str name) -> ()")


def _load() -> bool:
    try:
        importlib.import_module("torch_kvq._C")  # registers the kernels
    except ImportError as error:
        warnings.warn(
            f"torch_kvq runs on its plain PyTorch references, which are slow: {error}",
            stacklevel=2,
        )
        return False
    return True


class CpuCapabilities(NamedTuple):
    """Instruction sets of this machine that have kernels, and the one in use."""

    available: tuple[str, ...]
    active: str


def cpu_capabilities() -> CpuCapabilities:
    """Instruction sets with kernels on this machine, fastest first, and the active one.

    The environment variable TORCH_KVQ_CPU_CAPABILITY forces one; without the compiled part the
    only capability is ``"reference"``.

    Example:
        >>> capabilities = cpu_capabilities()
        >>> capabilities.active in capabilities.available
        True
    """
    if not is_compiled:
        return CpuCapabilities(("reference",), "reference")
    active, *available = torch.ops.kvq._cpu_capabilities().split(",")
    return CpuCapabilities(tuple(available), active)


@contextlib.contextmanager
def cpu_capability(name: str) -> Iterator[None]:
    """Run a block on the kernels of one instruction set; not for concurrent threads.

    Args:
        name: one of ``cpu_capabilities().available``.

    Raises:
        ValueError: no such kernels on this machine.

    Example:
        >>> with cpu_capability(cpu_capabilities().available[-1]):
        ...     pass
    """
    before = cpu_capabilities()
    if name not in before.available:
        raise ValueError(f"name must be one of {before.available}, got {name!r}")
    if is_compiled:
        torch.ops.kvq._set_cpu_capability(name)
    try:
        yield
    finally:
        if is_compiled:
            torch.ops.kvq._set_cpu_capability(before.active)


is_compiled = _load()
if (forced := os.environ.get(_VARIABLE)) and forced not in cpu_capabilities().available:
    raise ValueError(f"{_VARIABLE} must be one of {cpu_capabilities().available}, got {forced!r}")
