"""Fixtures of the integration tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers are the same in every run."""
    torch.manual_seed(0)
