"""Speed of the working tree against another commit: ``python -m benchmarks.compare --base HEAD~1``.

Each round runs the benchmark of either checkout in a process of its own, one after the other, so
that a slow moment of the machine hits both. Contestants that share no code with the change show
what the ratios are worth: theirs should be 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from .environment import ROOT
from .report import Column, Table, markdown

BENCHMARKS = ("attention", "generate")

Medians = dict[str, float]
"""The median of every contestant of a run, in the unit of the benchmark's own table."""

COLUMNS = [
    Column("name", "contestant"),
    Column("base", "base", ",.1f"),
    Column("new", "new", ",.1f"),
    Column("ratio", "base / new", ".3f"),
    Column("lowest", "lowest", ".3f"),
    Column("highest", "highest", ".3f"),
]


def main() -> None:
    """Build the base, run both sides in turn, and print how many times faster the new one is."""
    args = parse_args()
    commit = git("rev-parse", "--verify", f"{args.base}^{{commit}}")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        check_out(commit, base)
        rounds = []
        for number in range(args.rounds):
            sides = [base, ROOT] if number % 2 == 0 else [ROOT, base]
            medians = {side: run(side, args.benchmark, args.quick) for side in sides}
            rounds.append((medians[base], medians[ROOT]))
            print(f"round {number + 1} of {args.rounds} done", file=sys.stderr)
    print(f"{args.benchmark}, {args.rounds} rounds, base {commit[:10]} against the working tree:\n")
    print(markdown(ratios(rounds)))


def parse_args() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("benchmark", nargs="?", choices=BENCHMARKS, default=BENCHMARKS[0])
    parser.add_argument("--base", required=True, metavar="REF", help="commit to compare with")
    parser.add_argument("--rounds", type=int, default=2, help="runs of either side, 2 or more")
    parser.add_argument("--quick", action="store_true", help="less of everything")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {args.rounds}")
    return args


def git(*arguments: str) -> str:
    """The output of a git command in this repository; exits when it fails."""
    command = ("git", "-C", str(ROOT), *arguments)
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        sys.exit(result.returncode)
    return result.stdout.strip()


def check_out(commit: str, folder: Path) -> None:
    """Clone a commit and compile its extension in place, with this interpreter."""
    print(f"building {commit[:10]}", file=sys.stderr)
    git("clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(folder))
    git("-C", str(folder), "checkout", "--quiet", "--detach", commit)
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    _run_in(folder, build, "cannot be built")


def run(checkout: Path, benchmark: str, quick: bool) -> Medians:
    """Run the benchmark of a checkout; exits when one of its checks fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        command = [sys.executable, "-m", "benchmarks.run", benchmark, "--json", str(path)]
        command += ["--quick"] if quick else []
        _run_in(checkout, command, "fails the benchmark, whose figures then say nothing")
        return read_medians(json.loads(path.read_text()))


def read_medians(report: dict) -> Medians:
    """The medians of a saved report; a contestant is named by its table and what precedes them."""
    medians = {}
    for table in report["tables"]:
        keys = [column["key"] for column in table["columns"]]
        if table["is_speed"] and "median" in keys:
            named_by = keys[: keys.index("median")]
            for row in table["rows"]:
                name = ", ".join(str(row[key]) for key in named_by)
                medians[f"{table['name']}: {name}"] = row["median"]
    return medians


def ratios(rounds: list[tuple[Medians, Medians]]) -> Table:
    """The ratio of base to new of every contestant of all runs, the middle one and the extremes."""
    names = [name for name in rounds[0][0] if all(name in run for pair in rounds for run in pair)]
    rows = []
    for name in names:
        pairs = [(base[name], new[name]) for base, new in rounds]
        each = [base / new for base, new in pairs]
        rows.append(
            {
                "name": name,
                "base": median(base for base, _ in pairs),
                "new": median(new for _, new in pairs),
                "ratio": median(each),
                "lowest": min(each),
                "highest": max(each),
            }
        )
    return Table("ratios", "Speed against the base", COLUMNS, rows, is_speed=True)


def _run_in(checkout: Path, command: list[str], failure: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    result = subprocess.run(
        command,
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if result.returncode:
        sys.exit(f"{result.stdout}\n{checkout} {failure}")


if __name__ == "__main__":
    main()
