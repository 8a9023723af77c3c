"""What tiered layers tell the archive and the promoter, and what they have back from them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from torch_kvq.cache.archive import Archive, ArchiveLayer
from torch_kvq.cache.promoter import Promoter
from torch_kvq.cache.tiered_state import TieredState


def keeps_archive(
    promote: bool | Literal["sync"],
    path: str | Path | None = None,
    budget: int | None = None,
    in_memory: bool = False,
) -> bool:
    """Whether a cache with these arguments has an archive, see `Promotion.make`.

    Raises:
        ValueError: ``promote`` is something else, or an archive is described that there is not to
            be.
    """
    if promote not in (True, False, "sync"):
        raise ValueError(f"promote must be True, False or 'sync', got {promote!r}")
    if not promote and (path is not None or budget is not None or in_memory):
        raise ValueError(
            f"promote=False keeps no archive, got archive={path!r}, archive_budget={budget}, "
            f"archive_in_memory={in_memory}"
        )
    return bool(promote)


class Promotion:
    """Archive and promoter of a cache.

    A copy has an archive of its own with the same tokens; one that was pickled has none.

    Args:
        archive: exact keys and values of all layers.
        in_memory: the archive is no file.
        promoter: options of `torch_kvq.cache.promoter.Promoter`.
    """

    def __init__(self, archive: Archive, in_memory: bool, promoter: dict[str, Any]) -> None:
        self.archive = archive
        self.in_memory = in_memory
        self._options = promoter
        self.promoter = Promoter(archive, **promoter)

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
        margin: float = 1.0,
    ) -> Promotion | None:
        """Archive and promoter from the arguments of a cache.

        Args:
            promote: let far tokens that suddenly matter come back exactly; ``"sync"``: always by
                the next step, so that results repeat; False: no archive is kept.
            path: of the archive, which is kept; a temporary file when None.
            budget: bytes of the archive; what was not used for longest is given up first.
            in_memory: no file.
            cooldown: steps from one token that comes back to a KV head to its next.
            promotions: tokens of a row and layer that may be on their way.
            margin: by which a log weight has to exceed the median use of the chosen near tokens.

        Raises:
            ValueError: ``promote`` is something else, or an archive is described that there is not
                to be.

        Example:
            >>> Promotion.make(False) is None
            True
        """
        if not keeps_archive(promote, path, budget, in_memory):
            return None
        options = {"cooldown": cooldown, "budget": promotions, "margin": margin}
        archive = Archive(path, budget=budget, in_memory=in_memory)
        return cls(archive, in_memory, {**options, "synchronous": promote == "sync"})

    def fork(self) -> Promotion:
        """Archive and promoter for a fork of the cache."""
        return type(self)(self.archive.fork(), self.in_memory, self._options)

    def __deepcopy__(self, memo: dict[int, Any]) -> Promotion:
        return self.fork()

    def __reduce__(self) -> Any:
        return _none, ()

    def close(self) -> None:
        """Stop the promoter and give up the archive."""
        self.promoter.close()
        self.archive.close()


class LayerPromotion:
    """The part of it that belongs to one layer.

    The archive numbers the tokens of a row by position, padding included.

    Args:
        index: the layer.
        whole: archive and promoter of the cache.

    Attributes:
        promoted: tokens that came back so far, counted for each KV head.
    """

    def __init__(self, index: int, whole: Promotion, promoted: int = 0) -> None:
        self.index = index
        self.whole = whole
        self.promoted = promoted

    @property
    def _archive(self) -> ArchiveLayer:
        return self.whole.archive.layer(self.index)

    def append(self, key: Tensor, value: Tensor) -> None:
        """Hand ``[batch, kv_heads, tokens, dim]`` to the archive."""
        self._archive.append(key, value)

    def submit(self, state: TieredState, index: Tensor, score: Tensor) -> None:
        """Name far tokens that the last queries attended to.

        Args:
            state: of the layer.
            index: int32 ``[batch, kv_heads, candidates]``, tokens of the row, -1 for none.
            score: float32, their log weights.
        """
        start = state.lengths[:, 0]
        found = [tensor.cpu() for tensor in (index, score, state.median_use, start)]
        self.whole.promoter.submit(self.index, *found)

    def publish(self, state: TieredState) -> None:
        """Let those tokens be near that have been read; what finds no room is offered again."""
        ready = self.whole.promoter.collect(self.index)
        if ready is None:
            return
        again = []
        places = zip(ready.row.tolist(), ready.head.tolist(), ready.token.tolist(), strict=True)
        for place, (row, head, token) in enumerate(places):
            if not state.is_far(row, head, token):
                continue
            use = float(ready.score[place])
            if state.promote(row, head, token, ready.key[place], ready.value[place], use):
                self.promoted += 1
            else:
                again.append(place)
        if again:
            self.whole.promoter.retry(self.index, torch.tensor(again, device="cpu"))

    def crop(self, length: int) -> None:
        """Keep the first ``length`` positions."""
        self._archive.crop(length)

    def restore(self, state: TieredState, row: int) -> None:
        """Let the recent tokens of a row be exact that a cut has brought back from a tile."""
        first, count = state.recent(row)
        if not count or self.whole.archive.failed:
            return
        head = torch.arange(state.kv_heads, device="cpu").repeat_interleave(count)
        token = torch.arange(first, first + count, device="cpu").repeat(state.kv_heads)
        read = self._archive.read(torch.full_like(token, row), head, token)
        state.put_exact(row, *(part.unflatten(0, (-1, count)) for part in read))

    def reorder(self, rows: list[int]) -> None:
        """Let row i become what row ``rows[i]`` is."""
        self._archive.reorder(torch.tensor(rows, device="cpu"))

    def reset(self) -> None:
        """Forget all tokens."""
        self._archive.reset()
        self.promoted = 0

    def __reduce__(self) -> Any:
        return _none, ()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerPromotion:
        whole = copy.deepcopy(self.whole, memo)
        return type(self)(self.index, whole, self.promoted)


def _none() -> None:
    """What an archive is after it was pickled."""
