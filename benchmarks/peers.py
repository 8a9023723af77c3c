"""Quantised caches of Transformers, which people would use instead."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

PEERS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "QuantizedCache(quanto, 4 bits)": ("optimum.quanto", {"backend": "quanto", "nbits": 4}),
    "QuantizedCache(hqq, 4 bits)": (
        "hqq",
        {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1},
    ),
    "QuantizedCache(fp8)": (None, {"backend": "fp8"}),
}
"""Caches by name: the package that each needs, and its arguments."""


def peer_caches(config: Any) -> dict[str, Callable[[], Any]]:
    """The caches whose package is installed, as functions that make one.

    Args:
        config: of the model.
    """
    from transformers import QuantizedCache

    return {
        name: partial(QuantizedCache, config=config, **options)
        for name, (package, options) in PEERS.items()
        if package is None or _is_installed(package)
    }


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def held_bytes(value: Any) -> int:
    """Bytes of all tensors in an object, in those it holds and in packed tensors."""
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    queue = [value]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor) and hasattr(item, "__tensor_flatten__"):
            names, _ = item.__tensor_flatten__()
            queue += [getattr(item, name) for name in names]
        elif isinstance(item, Tensor):
            sizes[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, dict):
            queue += item.values()
        elif isinstance(item, (list, tuple)):
            queue += item
        elif type(item).__module__.startswith(("transformers.cache_utils", "hqq")):
            queue += vars(item).values()
    return sum(sizes.values())
