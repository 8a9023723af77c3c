"""Fixtures: one thread, and the instruction sets that have kernels here, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torch_kvq

CAPABILITIES = torch_kvq.cpu_capabilities()
TIERS = tuple(name for name in CAPABILITIES.available if name != "reference")


def pytest_report_header() -> str:
    """Say which kernels a run exercises."""
    return f"torch_kvq kernels: {', '.join(TIERS) or 'none'}; active: {CAPABILITIES.active}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test on every instruction set of this machine.

    One with a ``tier`` argument is about the kernels; one with ``capability`` is about what an
    operator means, so it runs on the references where no kernels are built.
    """
    if "tier" in metafunc.fixturenames:
        reason = "the compiled kernels are not built"
        absent = [pytest.param("reference", marks=pytest.mark.skip(reason=reason))]
        metafunc.parametrize("tier", TIERS or absent, indirect=True)
    if "capability" in metafunc.fixturenames:
        metafunc.parametrize("capability", CAPABILITIES.available, indirect=True)


def _activate(request: pytest.FixtureRequest) -> Iterator[str]:
    with torch_kvq.cpu_capability(request.param):
        yield request.param


tier = pytest.fixture(_activate, name="tier")
capability = pytest.fixture(_activate, name="capability")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small operations are quickest on one thread, by far on a machine that is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
