"""Results of a benchmark: on the console, as JSON, and in the documentation.

``python -m benchmarks.report`` writes the tables of the committed results into the documentation,
and their figures into docs/images/ where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .environment import ROOT

RESULTS = Path(__file__).parent / "results"
DOCUMENTS = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("accuracy", "performance", "tiers", "xquant")),
)
IMAGES = ROOT / "docs" / "images"
_BLOCK = re.compile(r"(<!-- begin (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        key: of the value in a row.
        title: heading.
        format: a format specification, empty for text.
    """

    key: str
    title: str
    format: str = ""

    def text(self, row: dict[str, Any]) -> str:
        """The value of a row as the reader sees it."""
        value = row.get(self.key)
        return "" if value is None else format(value, self.format)


@dataclass(frozen=True)
class Table:
    """Rows of figures.

    Attributes:
        name: for references from the documentation.
        title: what the figures are.
        columns: the first one names the row.
        rows: values by the keys of the columns.
        is_speed: shown only when every check passed.
    """

    name: str
    title: str
    columns: list[Column]
    rows: list[dict[str, Any]]
    is_speed: bool = False

    def cells(self) -> Iterator[list[str]]:
        """The rows as text."""
        for row in self.rows:
            yield [column.text(row) for column in self.columns]


@dataclass(frozen=True)
class Check:
    """A figure that must not exceed a limit.

    Attributes:
        name: what was measured.
        value: the figure.
        limit: its limit; a value that is not a number exceeds every limit.
    """

    name: str
    value: float
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the figure is within its limit."""
        return self.value <= self.limit

    @property
    def verdict(self) -> str:
        """PASS or FAIL."""
        return "PASS" if self.passed else "FAIL"


@dataclass(frozen=True)
class Report:
    """Everything a benchmark found.

    Attributes:
        benchmark: its name.
        environment: machine and versions.
        settings: what was measured, in words.
        checks: what must hold.
        tables: the figures.
    """

    benchmark: str
    environment: dict[str, str]
    settings: dict[str, str]
    checks: list[Check]
    tables: list[Table] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def shown(self) -> list[Table]:
        """The tables that may be shown: a fast wrong result is worth nothing."""
        return [table for table in self.tables if self.passed or not table.is_speed]

    def check_table(self) -> Table:
        """The checks as a table."""
        columns = [
            Column("name", "check"),
            Column("value", "measured", ".2g"),
            Column("limit", "limit", ".2g"),
            Column("verdict", ""),
        ]
        rows = [{**asdict(check), "verdict": check.verdict} for check in self.checks]
        return Table("checks", "Checks", columns, rows)

    def facts(self) -> Table:
        """Machine, versions and settings as a table."""
        rows = [
            {"name": name, "value": value}
            for name, value in {**self.environment, **self.settings}.items()
        ]
        return Table("environment", "Environment", [Column("name", ""), Column("value", "")], rows)

    def save(self, path: Path) -> None:
        """Write as JSON, without what may not be shown."""
        content = {**asdict(self), "tables": [asdict(table) for table in self.shown]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read what `save` wrote."""
        content = json.loads(path.read_text())
        content["checks"] = [Check(**check) for check in content["checks"]]
        content["tables"] = [
            Table(**{**table, "columns": [Column(**column) for column in table["columns"]]})
            for table in content["tables"]
        ]
        return cls(**content)

    def print(self) -> None:
        """Show on the console."""
        for table in (self.facts(), *self.shown, self.check_table()):
            _print(table)
        if not self.passed:
            print("A check failed; figures of speed are not shown.")


def _print(table: Table) -> None:
    try:
        from rich.console import Console
        from rich.table import Table as RichTable
    except ImportError:
        print(f"\n{table.title}\n{markdown(table)}")
        return
    shown = RichTable(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        side: Literal["left", "right"] = "right" if column.format else "left"
        shown.add_column(column.title, justify=side, no_wrap=index == 0)
    for cells in table.cells():
        shown.add_row(*cells)
    # What goes to a file must not be cut to the width of a terminal.
    Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(shown)


def worst(checks: list[Check]) -> list[Check]:
    """The check of each name with the greatest value; one that is no number is the greatest."""

    def size(check: Check) -> float:
        return math.inf if math.isnan(check.value) else check.value

    by_name: dict[str, Check] = {}
    for check in checks:
        by_name[check.name] = max(by_name.get(check.name, check), check, key=size)
    return list(by_name.values())


def markdown(table: Table) -> str:
    """A table as Markdown."""
    lines = [
        [column.title for column in table.columns],
        ["---:" if column.format else "---" for column in table.columns],
        *table.cells(),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def render(text: str) -> str:
    """Fill the blocks of a document, ``<!-- begin BENCHMARK/TABLE -->``, from the results."""
    return fill(text, _block)


def fill(text: str, block: Callable[[str], str]) -> str:
    """Fill the blocks of a document, ``<!-- begin NAME -->``, with the text for NAME."""
    return _BLOCK.sub(lambda found: f"{found[1]}{block(found[2])}{found[3]}", text)


def _block(reference: str) -> str:
    benchmark, name = reference.split("/")
    report = Report.load(RESULTS / f"{benchmark}.json")
    tables = {table.name: table for table in (report.facts(), report.check_table(), *report.shown)}
    if name not in tables:
        text = f"{benchmark}.json has no table {name!r}, only {', '.join(tables)}"
        print(text, file=sys.stderr)
        return f"Not measured: {text}.\n"
    return markdown(tables[name])


def main() -> None:
    """Write the tables and figures of the committed results into the documentation."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=main.__doc__)
    parser.add_argument("--check", action="store_true", help="only say whether they are there")
    args = parser.parse_args()
    for path in DOCUMENTS:
        text = path.read_text()
        filled = render(text)
        if args.check and text != filled:
            parser.exit(1, f"{path.name} differs from the results\n")
        path.write_text(filled)
    if not args.check:
        draw()


def draw() -> None:
    """Draw the figures, or say why not."""
    if importlib.util.find_spec("matplotlib") is None:
        print("figures not drawn: matplotlib is not installed (extra: plot)", file=sys.stderr)
        return
    from .plots import write

    write(IMAGES)


if __name__ == "__main__":
    main()
