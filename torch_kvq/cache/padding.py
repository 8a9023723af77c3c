"""Left padding as an attention mask shows it."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_kvq import _checks
from torch_kvq.reference.lut_attention import MASKED_BELOW


def attended(attn_mask: Tensor) -> Tensor:
    """Bool mask of the keys that a bool or additive mask lets through."""
    return attn_mask if attn_mask.dtype == torch.bool else attn_mask > MASKED_BELOW


def left_padding(
    attn_mask: Tensor | None, queries: int, before: int | Tensor, tokens: int
) -> Tensor | None:
    """Count the first new tokens of every row that are left padding.

    That is a new token which is not attended by the last query, nor by its own: the first alone
    would take what has left a sliding window for padding.

    Args:
        attn_mask: bool or additive ``[batch or 1, heads or 1, queries or 1, columns]``; columns
            are positions.
        queries: queries of the attention call, the last of which belongs to the last new token.
        before: positions before the new tokens; as a tensor it is not read, and columns that are
            missing are PyTorch's error.
        tokens: new tokens.

    Returns:
        int64 ``[batch or 1]``, or None without a mask.

    Raises:
        ValueError: the mask has fewer columns than there are positions.

    Example:
        >>> mask = torch.tensor([[False, False, True, True]]).expand(4, 4).tril()
        >>> left_padding(mask[None, None], queries=4, before=0, tokens=4)
        tensor([2])
    """
    if attn_mask is None:
        return None
    if isinstance(before, Tensor):
        columns = before + torch.arange(tokens, device=attn_mask.device)
        new = attn_mask.index_select(-1, columns)
    else:
        _checks.check_columns(attn_mask, before + tokens)
        new = attn_mask[..., before : before + tokens]
    seen = attended(new[:, :, -1])
    if new.shape[2] > 1:
        seen = seen | _by_own_query(new, min(queries, tokens))
    elif queries == 1 and tokens > 1:
        return None
    return (~seen.any(1)).long().cumprod(-1).sum(-1)


def _by_own_query(new: Tensor, queries: int) -> Tensor:
    """Bool ``[batch, heads, tokens]``; a token whose query is not there counts as attended."""
    own = attended(new[:, :, -queries:, -queries:].diagonal(dim1=-2, dim2=-1))
    return torch.nn.functional.pad(own, (new.shape[3] - queries, 0), value=True)
