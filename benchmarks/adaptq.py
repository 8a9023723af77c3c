"""AdapTQ, a packed cache with a CPU kernel of its own: https://pypi.org/project/adaptq/.

It is reached through the C API that its extension exports, past its Python classes. Release 0.2.2
is the one to install: the extension of 0.2.3 lacks symbols, and its scores are scaled wrongly.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import weakref

import torch
from torch import Tensor

NAME = "AdapTQ 4 bits"
INSTALL = "pip install adaptq==0.2.2"
BITS = 4
SEED = 42


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    """The C API, or None and the reason why there is none."""
    spec = importlib.util.find_spec("adaptq_py")
    if spec is None or spec.origin is None:
        return None, f"not installed: {INSTALL}"
    try:
        library = ctypes.CDLL(spec.origin)
    except OSError as error:
        return None, f"its extension does not load ({error}): {INSTALL}"
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.adaptq_version.restype = ctypes.c_char_p
    library.adaptq_mha_create.restype = pointer
    library.adaptq_mha_create.argtypes = (
        *[integer] * 4,
        ctypes.c_uint64,
        ctypes.c_float,
        integer,
    )
    library.adaptq_mha_append.argtypes = (pointer, integer, pointer, pointer, integer)
    library.adaptq_mha_compute.argtypes = (pointer, integer, pointer, pointer)
    library.adaptq_mha_destroy.argtypes = (pointer,)
    library.adaptq_mha_total_kv_bytes.argtypes = (pointer,)
    library.adaptq_mha_total_kv_bytes.restype = ctypes.c_size_t
    return library, ""


def missing() -> str:
    """Why AdapTQ cannot be timed, empty if it can."""
    return _load()[1]


def describe() -> str:
    """The release and how it is called, or why it is missing."""
    library, reason = _load()
    if library is None:
        return reason
    version = library.adaptq_version().decode()
    return f"{version}, C API, AVX2 kernel, all values (its sparse ones are slower), one thread"


class Cache:
    """Keys and values of a layer, packed once.

    Args:
        key: float32 ``[1, heads, tokens, dim]``; every query head has a KV head of its own.
        value: as ``key``.

    Raises:
        RuntimeError: AdapTQ is missing, see `missing`.
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        _, self.heads, tokens, self.dim = key.shape
        self._library, self._handle = self._create(tokens)
        self._append(key, value)

    @property
    def bytes(self) -> int:
        """Bytes of the packed tokens, without their scales."""
        return int(self._library.adaptq_mha_total_kv_bytes(self._handle))

    def attend(self, query: Tensor) -> Tensor:
        """Attention of one query per head.

        Args:
            query: float32 ``[1, heads, 1, dim]``, contiguous.

        Returns:
            float32 ``[1, heads, 1, dim]``.
        """
        out = torch.empty(query.shape)
        source, target, step = query.data_ptr(), out.data_ptr(), 4 * self.dim
        for head in range(self.heads):
            offset = head * step
            self._library.adaptq_mha_compute(self._handle, head, source + offset, target + offset)
        return out

    def decoded(self, x: Tensor) -> Tensor:
        """Keys or values as this cache rounds them.

        A cache of one token answers with its value. Its first token is appended twice, since it
        would stay uncompressed as long as it is the only one.

        Args:
            x: float32 ``[1, heads, tokens, dim]``.
        """
        single = Cache(*[x[:, :, :1]] * 2)
        parts = []
        for token in x.split(1, 2):
            single._append(token, token)
            parts.append(single.attend(token))
        return torch.cat(parts, 2)

    def _create(self, tokens: int) -> tuple[ctypes.CDLL, int]:
        library, reason = _load()
        if library is None:
            raise RuntimeError(reason)
        # Without sparse values (0) and without an uncompressed short cache (0).
        handle = library.adaptq_mha_create(self.heads, self.dim, BITS, tokens, SEED, 0.0, 0)
        weakref.finalize(self, library.adaptq_mha_destroy, handle)
        return library, handle

    def _append(self, key: Tensor, value: Tensor) -> None:
        key, value = key.contiguous(), value.contiguous()
        tokens, step = key.shape[2], 4 * self.dim
        for head in range(self.heads):
            for token in range(tokens):
                offset = (head * tokens + token) * step
                self._library.adaptq_mha_append(
                    self._handle, head, key.data_ptr() + offset, value.data_ptr() + offset, token
                )
