"""Argument checks of the operators on layer inputs; ``csrc/quantize_x.cpp`` is the C++ twin."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_kvq import _checks
from torch_kvq._x_formats import XFormat
from torch_kvq.formats import TILE_TOKENS


def check_x(x: Tensor, bits: int, axis: str) -> XFormat:
    """Check layer inputs ``[batch, tokens, channels]`` and return their record format."""
    _checks.check_rank(3, x=x)
    _checks.check_float(x=x)
    layout = XFormat(x.shape[2], bits, axis, x.element_size())
    if axis == "channel" and x.shape[1] % TILE_TOKENS:
        raise ValueError(
            "x.shape[1] must be a multiple of 64 (tokens of a group) with axis='channel', "
            f"got shape {tuple(x.shape)}"
        )
    return layout


def check_x_records(
    records: Tensor,
    channels: int,
    bits: int,
    axis: str,
    dtype: torch.dtype,
    name: str = "records",
) -> XFormat:
    """Check records ``[batch, pages, record_bytes]`` and return their format."""
    if dtype not in _checks.FLOATS:
        raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
    layout = XFormat(channels, bits, axis, dtype.itemsize)
    _checks.check_rank(3, **{name: records})
    _checks.check_dtype(torch.uint8, **{name: records})
    _checks.check_shape(name, records, (2, layout.record_bytes, "record_bytes"))
    return layout
