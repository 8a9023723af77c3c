"""Brings far tokens that suddenly matter from the archive."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from torch_kvq import _checks
from torch_kvq.cache.archive import Archive

_library = torch.library.Library("kvq", "FRAGMENT")
for _schema in (
    "_promoter_create(int archive, int cooldown, int budget, int retries, float margin, "
    "bool synchronous) -> int",
    "_promoter_close(int promoter) -> ()",
    "_promoter_submit(int promoter, int layer, Tensor index, Tensor score, Tensor near_score, "
    "Tensor? start) -> bool",
    "_promoter_collect(int promoter, int layer) -> Tensor[]",
    "_promoter_retry(int promoter, int layer, int[] places) -> ()",
    "_promoter_wait(int promoter) -> ()",
):
    _library.define(_schema)


class Promotions(NamedTuple):
    """Exact tokens that are ready to become near, n of them.

    Attributes:
        row: int64 ``[n]``.
        head: int64 ``[n]``, KV heads.
        token: int64 ``[n]``, as submitted.
        key: ``[n, key_dim]`` in the dtype of the archive.
        value: ``[n, value_dim]``.
        score: float32 ``[n]``, as submitted.
    """

    row: Tensor
    head: Tensor
    token: Tensor
    key: Tensor
    value: Tensor
    score: Tensor


class Promoter:
    """Reads far tokens from the archive on a thread of its own, between steps of decoding.

    A step of a layer is one `submit`, after its attention; `collect` comes before its next one.
    A candidate is accepted when

    * its score exceeds the near score of its KV head by more than ``margin``,
    * its KV head had no token accepted in the ``cooldown - 1`` steps before, in its row,
    * the same token of the same head and row is not under way,
    * the archive holds it, and
    * less than ``budget`` tokens of its row are under way in the layer, this step's included.

    The candidates of a row are taken by score, the greatest first, then by head and rank. So a row
    of a batch is served as if it were alone. Reordering the rows of the archive takes what is under
    way along, and cutting or resetting it drops the tokens that are cut.

    Args:
        archive: where the tokens are.
        cooldown: steps from one token of a KV head to its next.
        budget: tokens of a row and layer that may be under way.
        margin: log weight by which a token must exceed the near score.
        retries: how often a token that found no room is offered again.
        synchronous: read within `submit`, without a thread: the next `collect` has every token.

    Raises:
        ValueError: a cooldown, budget or retries outside their range.

    Example:
        >>> archive = Archive(in_memory=True)
        >>> key, value = torch.randn(2, 1, 1, 100, 64)
        >>> archive.layer(0).append(key, value)
        >>> promoter = Promoter(archive, synchronous=True)
        >>> index, score = torch.tensor([[[17, 4]]], dtype=torch.int32), torch.tensor([[[-1., -9]]])
        >>> promoter.submit(0, index, score, near_score=torch.tensor([[-5.0]]))
        >>> ready = promoter.collect(0)
        >>> ready.token.tolist(), torch.equal(ready.key[0], key[0, 0, 17])
        ([17], True)
    """

    def __init__(
        self,
        archive: Archive,
        *,
        cooldown: int = 5,
        budget: int = 8,
        margin: float = 0.0,
        retries: int = 3,
        synchronous: bool = False,
    ) -> None:
        _checks.check_not_negative(cooldown=cooldown, budget=budget, retries=retries)
        self.archive = archive
        self._handle: int = torch.ops.kvq._promoter_create(
            archive._handle, cooldown, budget, retries, margin, synchronous
        )
        self._close = weakref.finalize(self, torch.ops.kvq._promoter_close, self._handle)

    def submit(
        self,
        layer: int,
        index: Tensor,
        score: Tensor,
        near_score: Tensor,
        start: Tensor | None = None,
    ) -> None:
        """Offer what attention to a layer found; one step of the layer.

        Args:
            layer: which layer of the archive.
            index: int32 ``[batch, kv_heads, k]``, tokens, -1 for none.
            score: float32 ``[batch, kv_heads, k]``, their log weights.
            near_score: float32 ``[batch, kv_heads]``, the log weight to exceed.
            start: int32 ``[batch]``, added to the tokens of a row to find them in the archive: the
                padding, where ``index`` does not count it.

        Raises:
            IndexError: a token that the archive does not have.
            ValueError: shapes or dtypes outside the above, or rows and heads that are not those of
                the archive.
        """
        if self.archive._warned:
            return
        if not torch.ops.kvq._promoter_submit(self._handle, layer, index, score, near_score, start):
            self.archive.check()

    def collect(self, layer: int) -> Promotions | None:
        """What is ready of a layer, in the order it was accepted; None when nothing is."""
        ready = torch.ops.kvq._promoter_collect(self._handle, layer)
        return Promotions(*ready) if ready else None

    def retry(self, layer: int, places: Tensor) -> None:
        """Offer some of the tokens collected last again, since they found no room.

        They come with the next `collect` of the layer, at most ``retries`` times, and count as
        under way until then. Nothing happens when rows were reordered or tokens cut in between.

        Args:
            layer: which layer.
            places: integers ``[m]``, where they were in what `collect` returned.

        Raises:
            IndexError: places that were not there.
        """
        _checks.check_rank(1, places=places)
        torch.ops.kvq._promoter_retry(self._handle, layer, places.tolist())

    def wait(self) -> None:
        """Wait until all that was submitted is read."""
        torch.ops.kvq._promoter_wait(self._handle)

    def close(self) -> None:
        """Stop the thread. Happens by itself when the promoter is deleted or Python exits."""
        self._close()
