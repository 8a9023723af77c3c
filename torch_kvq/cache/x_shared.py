"""What the layers of a cache of layer inputs share: positions, and sums of differences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_kvq.cache.memory import tensor_bytes

CosSin = tuple[Tensor, Tensor]


class Shared:
    """Positions of the tokens, and what a call of the model hands from layer to layer.

    Attributes:
        positions: int32 ``[batch, tokens]`` as the rotary embedding got them, left padding
            included; None for a model without one.
    """

    def __init__(self) -> None:
        self.positions: Tensor | None = None
        self._rotary: dict[Any, CosSin] = {}
        self._sums: dict[tuple[int, int], tuple[int, Tensor]] = {}

    def note(self, before: int, positions: Tensor) -> None:
        """Take the positions of new tokens, which every layer is given.

        Args:
            before: tokens of the layer before these.
            positions: int ``[batch, tokens]``.
        """
        held = self.positions
        if before and held is not None:
            if held.shape[1] >= before + positions.shape[1]:
                return
            positions = torch.cat((held[:, :before], positions.to(held)), 1)
        self.positions = positions.to(torch.int32)
        self._rotary.clear()

    def cos_sin(self, key: Any, make: Callable[[Tensor], CosSin]) -> CosSin:
        """Cosines and sines of all tokens, made once for the layers of a call.

        Args:
            key: what tells rotary embeddings apart.
            make: gives those of positions ``[batch, tokens]``.
        """
        assert self.positions is not None
        if key not in self._rotary:
            self._rotary[key] = make(self.positions.long())
        return self._rotary[key]

    def sum_of(self, layer: int, tokens: tuple[int, int]) -> Tensor | None:
        """Records of the sum that a layer handed on for some tokens, while they are here."""
        found = self._sums.get(tokens)
        return found[1] if found is not None and found[0] == layer else None

    def hand_on(self, layer: int, tokens: tuple[int, int], records: Tensor) -> None:
        """Keep the sum of a layer for the one above, in the place of that from below."""
        self._sums[tokens] = (layer, records)

    def crop(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        self.forget()
        if self.positions is not None:
            self.positions = self.positions[:, :length].clone()

    def select(self, rows: list[int]) -> None:
        """Let row i become what row ``rows[i]`` is."""
        self.forget()
        if self.positions is not None:
            self.positions = self.positions[rows]

    def reset(self) -> None:
        """Forget all tokens."""
        self.forget()
        self.positions = None

    def forget(self) -> None:
        """Drop what can be made again."""
        self._rotary.clear()
        self._sums.clear()

    def fork(self) -> Shared:
        """The same for another cache."""
        fork = copy.copy(self)
        fork._rotary, fork._sums = {}, {}
        return fork

    def __getstate__(self) -> dict[str, Any]:
        return {"positions": self.positions, "_rotary": {}, "_sums": {}}

    def parts(self) -> dict[str, int]:
        """Bytes by what they are for."""
        rotary = sum(tensor_bytes(x) for pair in self._rotary.values() for x in pair)
        parts = {
            "positions": 0 if self.positions is None else tensor_bytes(self.positions),
            "rotary": rotary,
            "sums": sum(tensor_bytes(records) for _, records in self._sums.values()),
        }
        return {name: size for name, size in parts.items() if size}
