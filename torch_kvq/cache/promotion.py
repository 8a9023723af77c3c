"""What tiered layers tell the archive and the promoter, and what they have back from them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torch_kvq.cache.tiered_state import TieredState

_log = logging.getLogger("torch_kvq")


class Promotion:
    """Archive and promoter of a cache.

    Args:
        archive: `torch_kvq.cache.archive.Archive`, or what does the same.
        promoter: `torch_kvq.cache.archive.Promoter` of that archive.
        in_memory: the archive is in memory and no file.

    Attributes:
        is_on: tokens are archived and come back; not any more once the archive is lost.
    """

    def __init__(self, archive: Any, promoter: Any, in_memory: bool = False) -> None:
        self.archive = archive
        self.promoter = promoter
        self.in_memory = in_memory
        self._said = False

    @classmethod
    def make(
        cls,
        promote: bool | Literal["sync"],
        path: str | Path | None = None,
        *,
        budget: int | None = None,
        in_memory: bool = False,
        cooldown: int = 5,
        promotions: int = 8,
        margin: float = 0.0,
    ) -> Promotion | None:
        """Archive and promoter from the arguments of a cache.

        Args:
            promote: let far tokens that suddenly matter come back exactly; ``"sync"``: always by
                the next step, so that results repeat; False: no archive is kept.
            path: of the archive, which is kept; a temporary file when None.
            budget: bytes of the archive; what was not used for longest is given up first.
            in_memory: no file.
            cooldown: steps between two tokens of a layer and KV head.
            promotions: tokens of a layer in a step.
            margin: by which a log weight has to exceed that of the least used near token.

        Raises:
            ValueError: ``promote`` is something else, or an archive is described that there is not
                to be.
        """
        if promote not in (True, False, "sync"):
            raise ValueError(f"promote must be True, False or 'sync', got {promote!r}")
        if not promote:
            if path is not None or budget is not None or in_memory:
                raise ValueError(
                    f"promote=False keeps no archive, got archive={path!r}, "
                    f"archive_budget={budget}, archive_in_memory={in_memory}"
                )
            return None
        from torch_kvq.cache.archive import Archive, Promoter

        archive = Archive(path, budget=budget, in_memory=in_memory)
        promoter = Promoter(
            archive,
            cooldown=cooldown,
            budget=promotions,
            margin=margin,
            synchronous=promote == "sync",
        )
        return cls(archive, promoter, in_memory)

    @property
    def is_on(self) -> bool:
        """Whether the archive works; the first time that it does not, a warning says so."""
        if not self.archive.failed:
            return True
        if not self._said:
            self._said = True
            _log.warning(
                "the archive of a tiered cache is lost or its disk is full: far tokens stay far, "
                "and generation goes on"
            )
        return False

    def close(self) -> None:
        """Stop the promoter and give up the archive."""
        self.promoter.close()
        self.archive.close()


class LayerPromotion:
    """The part of it that belongs to one layer.

    Archive and promoter number the tokens of a row by position, padding included.

    Args:
        index: the layer.
        whole: archive and promoter of the cache.

    Attributes:
        promoted: tokens that came back so far, counted for each KV head.
    """

    def __init__(self, index: int, whole: Promotion) -> None:
        self.index = index
        self.whole = whole
        self.promoter = whole.promoter
        self.layer = whole.archive.layer(index)
        self.promoted = 0

    def append(self, key: Tensor, value: Tensor) -> None:
        """Hand ``[batch, kv_heads, tokens, dim]`` to the archive."""
        if self.whole.is_on:
            self.layer.append(key, value)

    def submit(self, state: TieredState, index: Tensor, score: Tensor) -> None:
        """Name far tokens that the last queries attended to.

        Args:
            state: of the layer.
            index: int32 ``[batch, kv_heads, candidates]``, tokens of the row, -1 for none.
            score: float32, their log weights.
        """
        if not self.whole.is_on:
            return
        position = torch.where(index >= 0, index + state.lengths[:, :1, None], -1)
        self.promoter.submit(self.index, position, score, state.least_use())

    def publish(self, state: TieredState) -> None:
        """Let those tokens be near that have been read."""
        for row, head, position, key, value in self.promoter.collect(self.index):
            token = int(position) - int(state.lengths[row, 0])
            self.promoted += state.promote(int(row), int(head), token, key, value)

    def crop(self, length: int) -> None:
        """Keep the first ``length`` positions."""
        self._forget()
        self.layer.crop(length)

    def reorder(self, rows: list[int]) -> None:
        """Let row i become what row ``rows[i]`` is."""
        self._forget()
        self.layer.reorder(torch.tensor(rows, device="cpu"))

    def reset(self) -> None:
        """Forget all tokens."""
        self._forget()
        self.layer.reset()
        self.promoted = 0

    def _forget(self) -> None:
        """Drop what is on its way: it names rows and tokens that are no longer the same."""
        self.promoter.collect(self.index)
