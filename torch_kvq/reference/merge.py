"""Attention to all tokens from attention to parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Merge results for parts of the tokens by their log-sum-exp.

    Args:
        parts: ``[batch, heads, queries, dim]`` and float32 ``[batch, heads, queries]`` of each, as
            the attention operators give them.

    Returns:
        ``[batch, heads, queries, dim]`` in the dtype of the parts, zero where none has a token.

    Example:
        >>> out, lse = torch.ones(1, 1, 1, 32), torch.zeros(1, 1, 1)
        >>> merge_attention([(out, lse), (3 * out, lse)]).unique()
        tensor([2.])
    """
    if len(parts) == 1:
        return parts[0][0]
    lse = torch.stack([lse for _, lse in parts])
    largest = lse.amax(0)
    weights = (lse - largest.masked_fill(largest == -torch.inf, 0.0)).exp()
    weights = weights / weights.sum(0).clamp(min=1e-30)
    first = parts[0][0]
    total = torch.zeros_like(first, dtype=torch.float32)
    for (out, _), weight in zip(parts, weights, strict=True):
        total += weight.unsqueeze(-1) * out
    return total.to(first.dtype)
