"""Which tokens of a layer are near: as numbers and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_kvq.cache.tiered_state import TieredState

FAR, NEAR, PROMOTED = 0, 1, 2

_COLOURS = ("#e8e8e8", "#4878a8", "#d1495b")
_NAMES = ("far", "near", "came back")


@dataclass(frozen=True)
class TierMap:
    """Tiers of the tokens of one row.

    Attributes:
        tiers: uint8 ``[kv_heads, tokens]``: 0 far, 1 near, 2 near and come back from the archive.
            What a sliding window has left counts as far.
    """

    tiers: Tensor

    @classmethod
    def of(cls, state: TieredState, row: int) -> TierMap:
        """The map of a row.

        Raises:
            ValueError: the row does not exist.
        """
        if not 0 <= row < state.batch_size:
            raise ValueError(f"row must be from 0 to {state.batch_size - 1}, got {row}")
        start, length, _ = state.lengths[row].tolist()
        tiers = state.lengths.new_full((state.kv_heads, max(length - start, 0)), FAR).byte()
        near = state.near(row).slots(0, state.kept + state.length - state.first)
        head, slot = (near.token >= 0).nonzero(as_tuple=True)
        tiers[head, near.token[head, slot].long()] = NEAR + near.returned[head, slot].byte()
        return cls(tiers)

    def counts(self) -> dict[str, int]:
        """Tokens of all heads by tier.

        Example:
            >>> import torch
            >>> TierMap(torch.tensor([[1, 0, 0, 2, 1]])).counts()
            {'far': 2, 'near': 2, 'came back': 1}
        """
        return {name: int((self.tiers == tier).sum()) for tier, name in enumerate(_NAMES)}

    def plot(self, axes: Any = None, title: str = "") -> Any:
        """Draw tokens against KV heads; needs matplotlib.

        Args:
            axes: matplotlib axes to draw on; those of a new figure when not given.
            title: of the picture.

        Returns:
            The figure.

        Raises:
            ImportError: matplotlib is not installed.

        Example:
            >>> import torch
            >>> TierMap(torch.tensor([[1, 0, 2]])).plot(title="layer 0")  # doctest: +SKIP
            <Figure size 900x300 with 1 Axes>
        """
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        if axes is None:
            import matplotlib.pyplot as plt

            axes = plt.figure(figsize=(9, 3), layout="constrained").subplots()
        axes.imshow(
            self.tiers.cpu().numpy(),
            aspect="auto",
            interpolation="nearest",
            cmap=ListedColormap(_COLOURS),
            vmin=FAR,
            vmax=PROMOTED,
        )
        axes.set(xlabel="token", ylabel="KV head", yticks=range(len(self.tiers)), title=title)
        counts = self.counts()
        handles = [
            Patch(color=colour, label=f"{name} ({counts[name]})")
            for name, colour in zip(_NAMES, _COLOURS, strict=True)
        ]
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3)
        return axes.figure
