"""What the linker may do with the objects of the kernels."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CXX = os.environ.get("CXX", "c++").split()
FLAGS = "-std=c++17 -O3 -w -fPIC -ffp-contract=off -fno-math-errno -fno-trapping-math".split()
FOLDERS = sorted({path.parent for path in ROOT.glob("ops_cpu/*/encode.cpp")})

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads ELF symbols"),
    pytest.mark.skipif(shutil.which(CXX[0]) is None, reason=f"no compiler {CXX[0]}"),
    pytest.mark.skipif(shutil.which("nm") is None, reason="no nm"),
]


def weak_symbols(source: Path, tmp_path: Path) -> list[str]:
    """What `source` defines and the linker may take from, or give to, any other object."""
    target = tmp_path / f"{source.stem}.o"
    subprocess.run([*CXX, *FLAGS, f"-I{ROOT}", "-c", source, "-o", target], check=True)
    nm = ["nm", "-C", "--defined-only", target]
    lines = subprocess.run(nm, capture_output=True, text=True, check=True).stdout.splitlines()
    symbols = [line.split(maxsplit=2)[1:] for line in lines]
    return [f"{source.name}: {name}" for kind, name in symbols if kind in "WVu"]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_no_inline_function_leaves_its_instruction_set(folder, tmp_path):
    """One compiled for a wider set must not replace the portable one of the same name."""
    sources = sorted(folder.glob("*.cpp"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda source: weak_symbols(source, tmp_path), sources)
        assert sum(found, []) == []


def test_weak_symbols_are_seen(tmp_path):
    source = tmp_path / "weak.cpp"
    source.write_text("inline int once() { return 1; }\nint (*pointer)() = once;\n")
    assert weak_symbols(source, tmp_path) == ["weak.cpp: once()"]
