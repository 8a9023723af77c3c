"""What a measurement depends on beside the code."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path

import torch

import torch_kvq

ROOT = Path(__file__).parent.parent
PEERS = ("optimum-quanto", "hqq", "llama-cpp-python", "adaptq", "vllm")
"""Packages with packed caches of their own. All but vLLM take part where they are installed; the
recipes that stand for others need none."""

_CPU = Path("/sys/devices/system/cpu/cpu0")


def describe() -> dict[str, str]:
    """The machine and the versions, by name, in the order of the reports."""
    capabilities = torch_kvq.cpu_capabilities()
    return {
        "CPU": cpu_model(),
        "last-level cache": f"{last_level_cache() / 2**20:.0f} MiB",
        "instruction set of torch_kvq": f"{capabilities.active} of "
        + ", ".join(capabilities.available),
        "instruction set of PyTorch": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "torch_kvq": f"{torch_kvq.__version__}, commit {commit()}",
        "peers as packages": ", ".join(f"{name} {version(name)}" for name in PEERS),
    }


def cpu_model() -> str:
    """Name of the processor, with its family where the name alone says little."""
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    text = info.read_text()
    values = [
        match.group(1)
        for key in ("model name", "cpu family", "model")
        if (match := re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE))
    ]
    if len(values) < 3:
        return platform.machine()
    return "{} (family {}, model {})".format(*values)


def last_level_cache() -> int:
    """Bytes of the largest cache of a core, 32 MiB where the system does not tell."""
    sizes = [path.read_text().strip() for path in _CPU.glob("cache/index*/size")]
    units = {"K": 2**10, "M": 2**20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes), default=32 * 2**20)


def commit() -> str:
    """The checked-out commit, and whether the package differs from it."""
    head = _git("rev-parse", "--short=10", "HEAD")
    if head is None:
        return "unknown"
    changed = _git("status", "--porcelain", "--", "torch_kvq", "csrc", "ops_cpu")
    return f"{head} with changes" if changed else head


def _git(*arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def version(package: str) -> str:
    """The installed version of a package, or that it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
