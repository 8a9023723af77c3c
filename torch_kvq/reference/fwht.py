"""Meaning of ``kvq::fwht``."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_kvq import _checks
from torch_kvq.reference import hadamard


def fwht(x: Tensor, signs: Tensor | None = None, inverse: bool = False) -> Tensor:
    """Orthonormal Hadamard transform, computed in float32.

    Args:
        x: ``[..., dim]``, float32, float16 or bfloat16.
        signs: float32 ``[dim]``, a factor before the transform, after it when ``inverse``.
        inverse: apply the inverse transform.

    Returns:
        ``[..., dim]`` in the dtype of ``x``.
    """
    _checks.check_transform(x, signs)
    z = x.to(torch.float32)
    if signs is not None and not inverse:
        z = z * signs
    z = hadamard.transform(z, inverse)
    if signs is not None and inverse:
        z = z * signs
    return z.to(x.dtype)
