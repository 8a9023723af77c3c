"""Near slots of a tiered layer: which tokens they hold, and which far ones these stand for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_kvq.formats import TILE_TOKENS


class Near(NamedTuple):
    """Near tokens of one row, or of one row and candidates for its slots.

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

    def joined(self, other: Near) -> Near:
        """These slots and, behind them, others."""
        return Near(*(torch.cat(pair, 1) for pair in zip(self, other, strict=True)))

    def clear(self) -> None:
        """Leave no token in any slot."""
        self.token.fill_(-1)
        self.use.fill_(-torch.inf)
        self.returned.fill_(False)

    def fill(
        self, candidates: Near, count: int, sink_tokens: int, rank: Tensor | None = None
    ) -> Tensor:
        """Take the sinks and the first ``count`` of the candidates, and no other.

        Args:
            candidates: tokens, each once; they may be views of these slots.
            count: how many beside the sinks.
            sink_tokens: first tokens of the row.
            rank: float32 ``[kv_heads, candidates]``, the greatest first; their use when None. Of
                equals the earlier candidate comes first.

        Returns:
            float32 ``[kv_heads]``, the median use of those taken, sinks left out; that of the first
            candidate where none is.
        """
        is_sink = (candidates.token >= 0) & (candidates.token < sink_tokens)
        # A token that nothing attended to still comes before an empty slot.
        rank = candidates.use if rank is None else rank
        rank = rank.nan_to_num(neginf=torch.finfo(torch.float32).min)
        rank = rank.masked_fill(is_sink, torch.inf).masked_fill(candidates.token < 0, -torch.inf)
        order = rank.sort(dim=1, descending=True, stable=True).indices
        middle = candidates.use.gather(1, order[:, sink_tokens : sink_tokens + max(count, 1)])
        count = min(count + sink_tokens, rank.shape[1], self.token.shape[1])
        chosen = [_gathered(tensor, order[:, :count]) for tensor in candidates]
        self.clear()
        for slots, taken in zip(self, chosen, strict=True):
            slots[:, :count] = taken
        self.use[:, :count].masked_fill_(self.token[:, :count] < 0, -torch.inf)
        return middle.median(1).values


def _gathered(tensor: Tensor, order: Tensor) -> Tensor:
    if tensor.dim() == 2:
        return tensor.gather(1, order)
    return tensor.gather(1, order.unsqueeze(2).expand(-1, -1, tensor.shape[2]))


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
