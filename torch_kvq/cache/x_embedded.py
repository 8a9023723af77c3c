"""The first layer, whose input follows from the token where there is nothing else in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from torch_kvq._x_ops import quantize_x
from torch_kvq.cache.x_layer import XQuantLayer
from torch_kvq.cache.x_source import Records, Staged
from torch_kvq.cache.x_state import Stream, XState
from torch_kvq.formats import PASS_THROUGH_BITS

_BLOCK_TOKENS = 2048
"""Tokens whose inputs exist at a time."""


class EmbeddedLayer(XQuantLayer):
    """Tokens by their numbers, from which embedding and norm give the layer's input exactly.

    This is tried on every update. Where the input is another one, since positions, images or given
    embeddings are in it, the layer stores inputs like the others from then on.
    """

    _by_number = False

    def _parts_of(self, staged: Staged) -> list[Tensor]:
        matches = self._matches(staged)
        if self.state is None or self.state.is_empty:
            self._by_number = matches
            self.state = None
        elif self._by_number and not matches:
            self._store_inputs()
        if not self._by_number:
            return super()._parts_of(staged)
        assert staged.ids is not None
        return [staged.ids.to(torch.int32).unsqueeze(-1)]

    def _matches(self, staged: Staged) -> bool:
        if staged.ids is None or staged.ids.shape != staged.x.shape[:2]:
            return False
        made = self._bound().embedded(staged.ids)
        return made is not None and torch.equal(made, staged.x)

    def _store_inputs(self) -> None:
        """Let the tokens so far be inputs, too."""
        x = self._whole()[0]
        self._by_number = False
        self.state = XState(x, self.streams(x.shape[2]))
        self.state.append([x])
        self.flush()

    def streams(self, channels: int) -> list[Stream]:
        """Numbers, or the input."""
        return [Stream(1, 16, "token")] if self._by_number else super().streams(channels)

    def _due(self) -> int:
        return 0 if self._by_number else super()._due()

    def handed_on(self, first: int, last: int) -> Records:
        """Input of tokens, from which a layer above takes its differences."""
        if not self._by_number:
            return super().handed_on(first, last)
        return self._exactly(self._inputs(slice(first, last)))

    def _parts(self, queries: int) -> Iterator[list[Records]]:
        """Blocks of tokens: of numbers, the inputs would take what is saved elsewhere."""
        if not self._by_number:
            yield from super()._parts(queries)
            return
        ends = [*range(_BLOCK_TOKENS, self.state.length - queries, _BLOCK_TOKENS)]
        for first, end in itertools.pairwise([0, *ends, self.state.length]):
            x = self._inputs(slice(first, end))
            yield [self._exactly(x[:, :0])._replace(exact=x)]

    def _exactly(self, x: Tensor) -> Records:
        records = quantize_x(x, PASS_THROUGH_BITS)
        return Records([records], [PASS_THROUGH_BITS], self.options.group_axis, x[:, :0])

    def _whole(self) -> list[Tensor]:
        return [self._inputs()] if self._by_number else super()._whole()

    def _inputs(self, tokens: slice = slice(None)) -> Tensor:
        ids = self.state.recent[0][:, tokens].squeeze(-1)
        made = self._bound().embedded(ids.to(self._like.device))
        if made is None:
            raise ValueError(
                f"the embedding of {self._name} is gone or is not that of the tokens held: a cache "
                "belongs to one model"
            )
        return made.to(ids.device, self._like.dtype)
