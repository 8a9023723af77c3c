"""A plain attention kernel for float16, to tell compression from a better kernel than PyTorch's.

It is compiled when it is first asked for, with ``$CXX`` or ``c++``, for this machine alone.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

_SOURCE = Path(__file__).parent / "fp16_attention.cpp"
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math")


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The compiled kernel, or None and the reason why there is none."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "fp16_attention.so"
        command = (*compiler, *_FLAGS, "-shared", "-fPIC", "-o", str(library), str(_SOURCE))
        try:
            subprocess.run(command, check=True, capture_output=True)
        except OSError:
            return None, f"no C++ compiler {compiler[0]!r}"
        except subprocess.CalledProcessError:
            return None, f"{compiler[0]} does not compile it for this machine"
        return ctypes.CDLL(str(library)), ""


def missing() -> str:
    """Why the kernel cannot be used, empty if it can."""
    return _load()[1]


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one query per head, on one thread.

    Args:
        query: float16 ``[1, heads, 1, dim]``, dim 64 or 128.
        key: float16 ``[1, kv_heads, tokens, dim]``, contiguous.
        value: as ``key``.

    Returns:
        float32 ``[1, heads, 1, dim]``.

    Raises:
        RuntimeError: there is no kernel, see `missing`.
        ValueError: another dim.
    """
    library, reason = _load()
    if library is None:
        raise RuntimeError(reason)
    _, kv_heads, tokens, dim = key.shape
    out = torch.empty(query.shape, dtype=torch.float32)
    failed = library.fp16_attention(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (query, key, value, out)),
        query.shape[1],
        kv_heads,
        dim,
        ctypes.c_int64(tokens),
    )
    if failed:
        raise ValueError(f"dim must be 64 or 128, got {dim}")
    return out
