"""An attention layer of one's own, with a packed cache and without a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_kvq import KVQLayer

HEADS, KV_HEADS, DIM = 4, 2, 64


class Attention(torch.nn.Module):
    """Projects its input, and attends to it and to all before it."""

    def __init__(self, layer: KVQLayer) -> None:
        super().__init__()
        self.layer = layer
        self.query = torch.nn.Linear(32, HEADS * DIM)
        self.key = torch.nn.Linear(32, KV_HEADS * DIM)
        self.value = torch.nn.Linear(32, KV_HEADS * DIM)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of ``[batch, tokens, 32]``."""
        query, key, value = (
            project(x).unflatten(2, (-1, DIM)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        self.layer.update(key, value)
        return self.layer.attend(query, mask, is_causal=mask is None)


def make_attention(tokens: int = 0, **options: Any) -> Attention:
    """The same weights each time, and a layer with so many tokens."""
    torch.manual_seed(0)
    attention = Attention(KVQLayer(4, **options)).requires_grad_(False)
    if tokens:
        attention(torch.randn(1, tokens, 32))
    return attention
