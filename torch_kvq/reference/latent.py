"""Layer inputs in the row space of a projection, and the projection from there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_kvq.formats import TILE_TOKENS

BLOCK = TILE_TOKENS
"""Latent channels come in multiples of so many, the channels that are rotated together."""


def latent_factors(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Split a projection in two by its singular values: ``weight = rest @ basis``.

    Args:
        weight: ``[out, channels]``, as that of ``torch.nn.Linear``.

    Returns:
        ``basis``, float32 ``[latents, channels]`` with orthonormal rows, and ``rest``, float32
        ``[out, latents]``. There are as many latents as the weight can have singular values, and
        zeros up to a multiple of 64.

    Example:
        >>> weight = torch.randn(32, 128)
        >>> basis, rest = latent_factors(weight)
        >>> basis.shape, bool(torch.allclose(rest @ basis, weight, atol=1e-4))
        (torch.Size([64, 128]), True)
    """
    left, values, right = torch.linalg.svd(weight.to(torch.float64), full_matrices=False)
    missing = -len(values) % BLOCK
    basis = F.pad(right, (0, 0, 0, missing))
    rest = F.pad(left * values, (0, missing))
    return basis.to(torch.float32).contiguous(), rest.to(torch.float32).contiguous()


def to_latent(x: Tensor, basis: Tensor) -> Tensor:
    """Coordinates of layer inputs in a basis.

    Args:
        x: ``[batch, tokens, channels]``.
        basis: ``[latents, channels]`` in the same dtype.

    Returns:
        ``[batch, tokens, latents]``.
    """
    return F.linear(x, basis)
