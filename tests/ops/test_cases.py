"""The case table covers every value of every axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests import cases
from tests.cases import CASES, Case

AXES: dict[str, tuple[Callable[[Case], Any], tuple[Any, ...]]] = {
    "bits": (lambda case: case.bits, cases.BITS),
    "key dim": (lambda case: case.key_dim, cases.DIMS),
    "value dim": (lambda case: case.value_dim, cases.DIMS),
    "4 bits by dim": (lambda case: (case.bits[0], case.key_dim), tuple((4, d) for d in cases.DIMS)),
    "group": (lambda case: case.heads // case.kv_heads, cases.GROUPS),
    "dtype": (lambda case: case.dtype, cases.DTYPES),
    "bits by dtype": (
        lambda case: (case.bits[0], case.dtype),
        tuple((bits, dtype) for bits in (2, 3, 4, 16) for dtype in cases.DTYPES),
    ),
    "length": (lambda case: case.length, (*cases.FROM_ZERO, *cases.FROM_256)),
    "queries": (lambda case: case.queries if case.is_causal else 0, cases.QUERIES),
    "mask": (lambda case: case.mask, tuple(cases.MASKS)),
    "mask with queries": (lambda case: (case.mask is not None, case.queries > 1), ((True, True),)),
    "window": (lambda case: case.sliding_window, (None, 1, 16, 64, 100, 1000)),
    "softcap": (lambda case: case.softcap is not None, (True, False)),
    "sinks": (lambda case: case.sinks, (True, False)),
    "sink tokens": (lambda case: case.sink_tokens, (0, 1, 4, 7)),
    "residual length": (lambda case: case.residual_length, (0, 16, 64, 128)),
    "quantized start": (lambda case: case.quantized_start, (0, 128, 256)),
    "padding": (lambda case: max(case.starts) > 0, (True, False)),
    "row of padding": (lambda case: max(case.starts) >= case.length > 0, (True,)),
    "shared pages": (lambda case: case.shared_pages, (True, False)),
    "cut": (lambda case: min(case.steps) < 0, (True, False)),
    "data": (lambda case: case.data, tuple(cases.DATA)),
}


@pytest.mark.parametrize("axis", AXES)
def test_axis_is_covered(axis: str) -> None:
    read, wanted = AXES[axis]
    missing = set(wanted) - {read(case) for case in CASES}
    assert not missing


def test_dims_of_keys_and_values_differ_both_ways() -> None:
    assert {case.key_dim > case.value_dim for case in CASES if case.key_dim != case.value_dim} == {
        True,
        False,
    }


def test_ids_are_unique() -> None:
    assert len({case.id for case in CASES}) == len(CASES)


def test_padded_rows_have_tiles() -> None:
    lengths = [cases.expected(case).state.lengths.tolist() for case in CASES if case.batch > 1]
    assert any(start > 0 and quantized > 0 for rows in lengths for start, _, quantized in rows)


def test_some_case_ends_in_a_partial_tile() -> None:
    cut = [case for case in CASES if case.steps[-1] < 0]
    assert any(int(cases.expected(case).state.lengths[0, 2]) % 64 for case in cut)
