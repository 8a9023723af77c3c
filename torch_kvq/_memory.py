"""Memory for buffers that live long and are replaced by larger ones."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

_SMALLEST = 32768
"""Bytes from which a buffer has memory of its own; whole pages would waste more of less."""

_library = torch.library.Library("kvq", "FRAGMENT")
_library.define("_empty_pages(SymInt[] size, ScalarType dtype) -> Tensor")


def empty_buffer(size: Sequence[int], like: Tensor) -> Tensor:
    """An uninitialised tensor, on the CPU with memory of its own instead of the heap's.

    The C library keeps what is freed between allocations that remain, so a heap full of buffers
    that grow in turn becomes several times as large as what is alive. Such memory also starts on a
    page boundary, and comes in huge pages where the system has them: records of one head lie a page
    of the cache apart, and each would cost a look-up of its address.

    Args:
        size: shape of the tensor.
        like: the tensor whose dtype and device it has.

    Example:
        >>> empty_buffer((2, 3), torch.zeros(1, dtype=torch.float16)).dtype
        torch.float16
    """
    if like.device.type != "cpu":
        return like.new_empty(size)
    buffer: Tensor = torch.ops.kvq._empty_pages(size, like.dtype)
    return buffer


def _plain(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cpu")


def _empty_pages(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = math.prod(size)
    length = count * dtype.itemsize
    if length < _SMALLEST or not hasattr(mmap, "MAP_ANONYMOUS"):
        return _plain(size, dtype)
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a refusal costs speed and nothing else
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(size)


_library.impl("_empty_pages", _empty_pages, "CompositeExplicitAutograd")
torch.library.register_fake("kvq::_empty_pages", _plain, lib=_library)
