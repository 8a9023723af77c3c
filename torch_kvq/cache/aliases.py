"""Names that other quantised caches give to the options of those here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch_kvq.cache.options import parse_bits

_log = logging.getLogger("torch_kvq")

_SAME = {
    "nbits": "bits",
    "kv_bits": "bits",
    "quantized_kv_start": "quantized_start",
}

_SAME_IN = {
    "kvq": _SAME,
    "kvq-tiered": {"quantized_kv_start": "quantized_start", "residual_length": "window"},
    "kvq-x": {"nbits": "bits", "kv_bits": "bits"},
}

_PER_TOKEN = "every token of a tile has its own scale"
_PER_GROUP = "every 64 elements have a scale, and axis says along what they run"
_SCALES = {"kvq": _PER_TOKEN, "kvq-tiered": _PER_TOKEN, "kvq-x": _PER_GROUP}
_WITHOUT_MEANING = ("axis_key", "axis_value", "q_group_size", "kv_group_size")

_FROM_MODEL = ("compute_dtype", "device")


def translate(options: Mapping[str, Any], backend: str = "kvq") -> dict[str, Any]:
    """Arguments of a cache from the ``cache_config`` of a ``generate`` call.

    An option that is None counts as not given. Dtype and device are the model's, so they are
    accepted and ignored, with a line at level INFO.

    Args:
        options: by the names of the cache, of Transformers' quantised caches or of MLX.
        backend: which cache: ``"kvq"``, ``"kvq-tiered"`` or ``"kvq-x"``.

    Raises:
        ValueError: an option without a meaning, or two names of one that differ.

    Example:
        >>> translate({"nbits": "4/3", "quantized_kv_start": 128})
        {'bits': '4/3', 'quantized_start': 128}
        >>> translate({"far": "tile4", "residual_length": 64}, "kvq-tiered")
        {'far': 'tile4', 'window': 64}
    """
    same = _SAME_IN[backend]
    arguments: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name in _WITHOUT_MEANING:
            raise ValueError(
                f"cache_config[{name!r}] has no meaning for backend {backend!r}: "
                f"{_SCALES[backend]}, got {value!r}"
            )
        if name in _FROM_MODEL:
            _log.info("cache_config[%r]=%s is ignored: it is the model's", name, value)
            continue
        argument = same.get(name, name)
        if argument in arguments and not _agree(argument, arguments[argument], value):
            raise ValueError(
                f"cache_config[{sources[argument]!r}] and cache_config[{name!r}] are one option, "
                f"got {arguments[argument]!r} and {value!r}"
            )
        arguments.setdefault(argument, value)
        sources.setdefault(argument, name)
    return arguments


def refuse(unknown: Mapping[str, Any], cache: str = "KVQCache", backend: str = "kvq") -> None:
    """Raise TypeError for arguments that a cache does not have, saying what to use instead."""
    same = _SAME_IN[backend]
    for name, value in unknown.items():
        if name in same:
            advice = f"say {same[name]}={value!r}"
        elif name in _WITHOUT_MEANING:
            advice = f"it has no meaning here, {_SCALES[backend]}"
        elif name in _FROM_MODEL:
            advice = "it is the model's"
        elif name == "backend":
            advice = "only cache_config of generate() names a backend"
        else:
            advice = f"see help({cache})"
        raise TypeError(f"{cache}() has no argument {name!r}: {advice}, got {name}={value!r}")


def _agree(argument: str, one: Any, other: Any) -> bool:
    if argument == "bits":
        return parse_bits(one) == parse_bits(other)
    return bool(one == other)
