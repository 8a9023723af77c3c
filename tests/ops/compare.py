"""Comparisons that the tests of the operators share, and their error budgets."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tests.cases import State

BUDGET = {"exact": 1e-3, "fast": 6e-2}
"""Relative L2 error of the worst head against float arithmetic on the same codes."""

LSE_BUDGET = {"exact": (1e-5, 1e-3), "fast": (5e-3, 5e-2)}
"""Relative and absolute error of the log-sum-exp."""

FAST_LOGIT_STD = 3.0
"""Standard deviation of the scores up to which the budget of ``"fast"`` holds."""

assert_same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
"""Equal to the last bit, NaN included."""


def head_error(out: Tensor, expected: Tensor) -> float:
    """Largest relative L2 error of any head of any row, ``[batch, heads, tokens, dim]``."""
    assert out.shape == expected.shape
    error = (out.double() - expected.double()).flatten(2).norm(dim=-1)
    size = expected.double().flatten(2).norm(dim=-1)
    relative = torch.where(error == 0, error, error / size)
    return float(relative.max()) if relative.numel() else 0.0


def assert_attention_close(
    out: Tensor, lse: Tensor, expected_out: Tensor, expected_lse: Tensor, precision: str
) -> None:
    """Out and lse are within the budget of a precision and the rounding of the dtype."""
    rounding = 0.0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps
    assert head_error(out, expected_out) <= BUDGET[precision] + rounding
    relative, absolute = LSE_BUDGET[precision]
    torch.testing.assert_close(lse, expected_lse, rtol=relative, atol=absolute)


def live_exact(state: State) -> list[Tensor]:
    """The parts of the exact buffers that hold tokens."""
    held = [max(length - start, 0) - used for start, length, used in state.lengths.tolist()]
    buffers = (state.exact_key, state.exact_value)
    return [x[row, :, :n] for row, n in enumerate(held) for x in buffers]


def assert_state_equal(state: State, expected: State) -> None:
    """Equal bookkeeping, balance and tokens; memory without tokens may differ in the buffers."""
    assert_same(state.lengths, expected.lengths)
    assert_same(state.block_table, expected.block_table)
    assert_same(state.tiles, expected.tiles)
    assert_same(state.balance, expected.balance)
    for part, wanted in zip(live_exact(state), live_exact(expected), strict=True):
        assert_same(part, wanted)
