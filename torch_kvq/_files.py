"""Where files are kept that can be made again."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_dir() -> Path:
    """``$TORCH_KVQ_CACHE``, else ``torch_kvq`` in the user's cache."""
    if own := os.environ.get("TORCH_KVQ_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_kvq"


def write_once(target: Path, write: Callable[[Path], None]) -> None:
    """Write a file or a folder that is not there, whole or not at all.

    Args:
        target: its final name, which only what is complete gets; of two processes the first wins.
        write: makes it under another name in the same folder.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".making-") as scratch:
        made = Path(scratch) / target.name
        write(made)
        try:
            made.rename(target)
        except OSError:
            if not target.exists():
                raise
