"""docs/compatibility.md: what works with which model.

``python -m tests.integrations.compatibility --write`` runs everything and writes the page.
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from benchmarks.report import Column, Table, fill, markdown
from tests.integrations.observe import GROUPS, Case, Outcome, cell, layout
from tests.models import ARCHITECTURES, tiny_model

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
RELEASE = ".".join(transformers.__version__.split(".")[:2])


def outcomes(name: str) -> Iterator[tuple[Case, str, Outcome]]:
    """Everything that was observed with a model, by attention implementation."""
    for case in (case for cases in GROUPS.values() for case in cases):
        for attention, outcome in cell(name, case):
            yield case, attention, outcome


def rows(name: str) -> dict[str, dict[str, str]]:
    """The rows of a model, by the table that they belong to."""
    found = {
        group: {"model": name, **{case.title: _text(cell(name, case)) for case in cases}}
        for group, cases in GROUPS.items()
    }
    offered = [attention for attention, _ in cell(name, GROUPS["decoding"][0])]
    kind = type(tiny_model(name, offered[0])).__name__
    found["models"] = {
        "model": name,
        "class": f"`{kind}`",
        "attention": ", ".join(offered),
        "packed layers": layout(name),
    }
    return found


def _text(seen: tuple[tuple[str, Outcome], ...]) -> str:
    """One word where all attention implementations agree."""
    words = {attention: _with_note(outcome) for attention, outcome in seen}
    if len(set(words.values())) > 1:
        return ", ".join(f"{attention}: {word}" for attention, word in words.items())
    return next(iter(words.values()), "not offered")


def _with_note(outcome: Outcome) -> str:
    return f"{outcome.word}[^{_label(outcome.note)}]" if outcome.note else outcome.word


def _label(note: str) -> str:
    return "-".join(re.findall(r"\w+", note.lower())[:6])


def _block(name: str) -> str:
    if name == "release":
        return f"Transformers {RELEASE}.\n"
    if name == "notes":
        notes = {outcome.note for model in ARCHITECTURES for *_, outcome in outcomes(model)}
        return "\n".join(f"[^{_label(note)}]: {note}\n" for note in sorted(notes) if note)
    found = [rows(model)[name] for model in ARCHITECTURES]
    return markdown(Table(name, "", [Column(key, key) for key in found[0]], found))


def render() -> str:
    """The page as it should be."""
    return fill(PAGE.read_text(), lambda reference: _block(reference.partition("/")[2]))


def main() -> None:
    """Say whether docs/compatibility.md holds what the runs give."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.integrations.compatibility", description=main.__doc__
    )
    parser.add_argument("--write", action="store_true", help="write what they give")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    text = render()
    if args.write:
        PAGE.write_text(text)
    elif text != PAGE.read_text():
        parser.exit(1, f"{PAGE.name} differs from the runs: call this with --write\n")


if __name__ == "__main__":
    main()
