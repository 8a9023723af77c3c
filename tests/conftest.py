"""Fixtures: the instruction sets that have kernels here, one at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torch_kvq

CAPABILITIES = torch_kvq.cpu_capabilities()
TIERS = tuple(name for name in CAPABILITIES.available if name != "reference")


def pytest_report_header() -> str:
    """Say which kernels a run exercises."""
    return f"torch_kvq kernels: {', '.join(TIERS) or 'none'}; active: {CAPABILITIES.active}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with a ``tier`` argument on every instruction set of this machine."""
    if "tier" in metafunc.fixturenames:
        reason = "the compiled kernels are not built"
        absent = [pytest.param("reference", marks=pytest.mark.skip(reason=reason))]
        metafunc.parametrize("tier", TIERS or absent, indirect=True)


@pytest.fixture
def tier(request: pytest.FixtureRequest) -> Iterator[str]:
    """Kernels of one instruction set are active during the test."""
    with torch_kvq.cpu_capability(request.param):
        yield request.param
