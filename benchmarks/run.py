"""Run one benchmark: ``python -m benchmarks.run NAME``; ``--help`` lists the names."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import registry


def main() -> int:
    """Run the benchmark of the command line; 1 when a check failed."""
    args = parse_args()
    report = registry.run(args.benchmark, args.quick)
    report.print()
    if args.json:
        report.save(args.json)
    return 0 if report.passed else 1


def parse_args() -> argparse.Namespace:
    """The options of the command line."""
    about = "\n".join(f"  {name:10} {what}" for name, what in registry.BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run",
        description=f"benchmarks:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("benchmark", choices=registry.BENCHMARKS)
    parser.add_argument("--quick", action="store_true", help="less of everything, in a minute")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the results there")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
