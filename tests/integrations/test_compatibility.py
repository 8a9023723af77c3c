"""docs/compatibility.md says what happens, and nothing happens that nobody meant."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from benchmarks.report import Column, Table, markdown
from tests.integrations.compatibility import PAGE, RELEASE, outcomes, render, rows
from tests.integrations.observe import GROUPS
from tests.models import ARCHITECTURES

WORDS = {"fused", "materialised", "stock layer", "refused", "not with DynamicCache"}

KNOWN = {
    # These give Bloom a mask of four dimensions for a static cache that is no StaticCache; it
    # takes two.
    ("5.16", "bloom", "static"),
    ("5.20", "bloom", "static"),
}

is_release_of_the_page = pytest.mark.skipif(
    f"\nTransformers {RELEASE}.\n" not in PAGE.read_text(),
    reason="the page is about another release of Transformers",
)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nothing_fails(name: str) -> None:
    odd = [
        (case.title, attention, outcome.word, outcome.note)
        for case, attention, outcome in outcomes(name)
        if outcome.word not in WORDS and (RELEASE, name, case.title) not in KNOWN
    ]
    assert not odd


@is_release_of_the_page
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_page_has_the_rows_of_a_model(name: str) -> None:
    page = PAGE.read_text().splitlines()
    for table, row in rows(name).items():
        text = markdown(Table(table, "", [Column(key, key) for key in row], [row]))
        assert text.splitlines()[-1] in page, "python -m tests.integrations.compatibility --write"


@is_release_of_the_page
def test_page_is_what_the_runs_give() -> None:
    assert render() == PAGE.read_text(), "python -m tests.integrations.compatibility --write"


def test_every_kind_of_case_is_packed_somewhere() -> None:
    """A case that no model can run would say nothing."""
    for case in (case for cases in GROUPS.values() for case in cases):
        words = {
            outcome.word
            for name in ARCHITECTURES
            for seen, _, outcome in outcomes(name)
            if seen is case
        }
        assert words & {"fused", "materialised"}, case.title
