"""Near slots of a tiered layer: which tokens they hold, and which far ones these stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_kvq.formats import TILE_TOKENS


class Near(NamedTuple):
    """Near slots of one row, or tokens that may come into them.

    Attributes:
        key: ``[kv_heads, slots, key_dim]``.
        value: ``[kv_heads, slots, value_dim]``.
        token: int32 ``[kv_heads, slots]``, the token, -1 in an empty slot.
        use: float32 ``[kv_heads, slots]``, log weight: how much the token was attended to.
        returned: bool ``[kv_heads, slots]``, the token came back from the archive.
    """

    key: Tensor
    value: Tensor
    token: Tensor
    use: Tensor
    returned: Tensor

    def slots(self, first: int, end: int) -> Near:
        """A range of slots, as views."""
        return Near(*(tensor[:, first:end] for tensor in self))

    def take(self, new: Near, count: int, sink_tokens: int, rank: Tensor | None = None) -> Tensor:
        """Keep the sinks and the first ``count`` of these tokens and of new ones, and no other.

        Those that stay keep their slots.

        Args:
            new: tokens that are not in these slots.
            count: how many beside the sinks.
            sink_tokens: first tokens of the row.
            rank: float32 ``[kv_heads, tokens]`` of the new ones, the greatest first; their use when
                None. Of equals the token in the earlier slot comes first, new ones last.

        Returns:
            float32 ``[kv_heads]``, the median use of those taken, sinks left out; that of the first
            where none is.
        """
        slots = self.token.shape[1]
        token = torch.cat((self.token, new.token), 1)
        order = _order(
            torch.cat((self.use, new.use if rank is None else rank), 1), token, sink_tokens
        )
        use = torch.cat((self.use, new.use), 1)
        middle = use.gather(1, order[:, sink_tokens : sink_tokens + max(count, 1)])
        stays = torch.zeros_like(token, dtype=torch.bool)
        stays.scatter_(1, order[:, : min(count + sink_tokens, slots)], True)
        stays &= token >= 0
        self.clear(~stays[:, :slots])
        free = (self.token < 0).byte().sort(dim=1, descending=True, stable=True).indices
        enters = stays[:, slots:]
        head, place = enters.nonzero(as_tuple=True)
        slot = free[head, enters.cumsum(1)[head, place] - 1]
        for mine, theirs in zip(self, new, strict=True):
            mine[head, slot] = theirs[head, place]
        return middle.median(1).values

    def clear(self, lost: Tensor) -> None:
        """Empty the slots that a bool ``[kv_heads, slots]`` names."""
        self.token.masked_fill_(lost, -1)
        self.use.masked_fill_(lost, -torch.inf)
        self.returned.masked_fill_(lost, False)


def _order(rank: Tensor, token: Tensor, sink_tokens: int) -> Tensor:
    """Places of tokens, sinks first, then by rank, empty slots last."""
    # A token that nothing attended to still comes before an empty slot.
    rank = rank.nan_to_num(neginf=torch.finfo(torch.float32).min)
    rank = rank.masked_fill(token < sink_tokens, torch.inf).masked_fill(token < 0, -torch.inf)
    return rank.sort(dim=1, descending=True, stable=True).indices


def promoted_masks(index: Tensor, sink_tokens: int, quantized: int, pages: int) -> Tensor:
    """Bits of the far tokens that are near, int64 ``[kv_heads, pages]``.

    Args:
        index: int32 ``[kv_heads, slots]``, near tokens, each once, -1 in empty slots.
        sink_tokens: tokens before the first far one.
        quantized: far tokens.
        pages: columns of the block table.

    Example:
        >>> promoted_masks(torch.tensor([[0, 4, -1, 69]]), sink_tokens=4, quantized=128, pages=2)
        tensor([[1, 2]])
    """
    place = index.long() - sink_tokens
    is_far = (place >= 0) & (place < quantized)
    place = place.masked_fill(~is_far, 0)
    bits = torch.bitwise_left_shift(is_far.long(), place % TILE_TOKENS)
    masks = bits.new_zeros((index.shape[0], max(pages, 1)))
    return masks.scatter_add_(1, place // TILE_TOKENS, bits)[:, :pages]
