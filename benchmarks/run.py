"""Run benchmarks: ``python -m benchmarks.run NAME``, or ``all``; ``--help`` lists the names."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from . import registry
from .report import Report, markdown

ALL = "all"
FOLDER = Path("build/benchmarks")
"""Where ``all`` writes unless told otherwise; figures of a release go to benchmarks/results."""


def main() -> int:
    """Run the benchmarks of the command line; 1 when a check failed."""
    args = parse_args()
    if args.benchmark == ALL:
        return run_all(args.json or FOLDER, args.quick)
    report = registry.run(args.benchmark, args.quick)
    report.print()
    if args.json:
        report.save(args.json)
    return 0 if report.passed else 1


def run_all(folder: Path, quick: bool) -> int:
    """Run every benchmark in a process of its own, so that none measures what another left.

    Args:
        folder: for the results and for ``report.md``, which holds their tables.
        quick: fewer settings and repeats.

    Returns:
        1 when a check failed or a benchmark did not run, else 0.
    """
    failed = []
    sections = ["# Benchmarks\n"]
    for name, what in registry.BENCHMARKS.items():
        path = folder / f"{name}.json"
        path.unlink(missing_ok=True)
        options = ["--json", str(path), *["--quick"] * quick]
        command = [sys.executable, "-m", __spec__.name, name, *options]
        if subprocess.run(command).returncode:
            failed.append(name)
        sections.append(f"## {name}: {what}\n\n{_section(path)}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text("\n".join(sections))
    print(f"report: {folder / 'report.md'}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _section(path: Path) -> str:
    if not path.exists():
        return "It did not run: its output says why.\n"
    report = Report.load(path)
    tables = (report.facts(), *report.shown, report.check_table())
    return "\n".join(f"### {table.title}\n\n{markdown(table)}" for table in tables)


def parse_args() -> argparse.Namespace:
    """The options of the command line."""
    about = "\n".join(f"  {name:10} {what}" for name, what in registry.BENCHMARKS.items())
    about += f"\n  {ALL:10} all of them in this order, and a report"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=f"benchmarks:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=(*registry.BENCHMARKS, ALL))
    parser.add_argument("--quick", action="store_true", help="less of everything, in a minute")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write the results there; for all, a folder"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
