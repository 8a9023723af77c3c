"""Tiered caches under any sequence of operations, with an archive and without."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from tests.cache.tiered import FAR_ERROR, check_counted_once, check_denominator, near_tokens
from tests.rows import HEADS, RULE, Held, check_lengths, tokens_of
from tests.sequences import Caches
from torch_kvq import formats
from torch_kvq.cache.promotion import LayerPromotion
from torch_kvq.cache.tier_options import TierOptions
from torch_kvq.cache.tiered_layer import TieredLayer


class TieredCaches(Caches):
    """Caches of a layer in each far format.

    A low margin lets tokens come back at every step, "sync" by the next one.
    """

    options: dict[str, Any] = {
        "near_ratio": 0.2,
        "promote": "sync",
        "archive_in_memory": True,
        "cooldown": 1,
        "margin": -100.0,
    }

    def new_cache(self) -> Any:
        """A cache of two layers."""
        cache = type(self).make_cache(**self.options)
        for index, far in enumerate(formats.FAR_FORMATS):
            options = TierOptions(near_ratio=self.options["near_ratio"], far=far, **RULE)
            layer = TieredLayer.from_options(options)
            if cache.promotion is not None:
                layer.promotion = LayerPromotion(index, cache.promotion)
            cache.layers.append(layer)
        return cache

    def cutting(self) -> Any:
        """A tile that is cut is decoded."""
        return contextlib.nullcontext()

    @property
    def all_are_near(self) -> bool:
        """No token is read from the far tier."""
        return bool(self.options["near_ratio"] == 1.0)

    def check_outputs(self, outputs: list[Tensor], want: list[Tensor]) -> None:
        """Attention of both layers, exact where all tokens are near."""
        for out, exact in zip(outputs, want, strict=True):
            if self.all_are_near:
                torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)
            else:
                assert (out - exact).norm() <= 0.25 * exact.norm()

    def check_held(self, held: Held) -> None:
        """Every token counts once, near ones are as they came, and the archive has all."""
        check_lengths(held)
        starts = [row.start for row in held.rows]
        for index, layer in enumerate(held.cache.layers):
            if not held.rows:
                continue
            check_counted_once(layer.state)
            check_denominator(layer, starts)
            self._check_tiers(held, layer, index)
            if layer.promotion is not None:
                _check_archive(held, layer.promotion, index)

    def _check_tiers(self, held: Held, layer: TieredLayer, index: int) -> None:
        state = layer.state
        assert state is not None
        # A tile that was cut without an archive comes back as it was decoded.
        is_exact = held.cache.promotion is not None or self.all_are_near
        for i, row in enumerate(held.rows):
            whole = tokens_of([row.ids[row.start : held.stored]], index)
            for decoded, want in zip(state.decode_row(i), whole, strict=True):
                assert (decoded - want[0]).norm() <= FAR_ERROR[layer.options.far] * want.norm()
                for head in range(HEADS if is_exact else 0):
                    tokens = near_tokens(state, i, head)
                    assert torch.equal(decoded[head, tokens], want[0, head, tokens])
                    assert not self.all_are_near or len(tokens) == want.shape[2]


def _check_archive(held: Held, promotion: LayerPromotion, index: int) -> None:
    """It has all positions of all rows exactly, padding included."""
    archive = promotion._archive
    if not held.length:
        assert not archive.tokens
        return
    assert (archive.rows, archive.tokens) == (len(held.rows), held.length)
    shape = (len(held.rows), HEADS, held.length)
    places = torch.cartesian_prod(*map(torch.arange, shape))
    key, value, found = archive.read(*places.unbind(1))
    assert found.all()
    for held_tokens, want in zip(
        (key, value), tokens_of([row.ids for row in held.rows], index), strict=True
    ):
        assert torch.equal(held_tokens.view(*shape, -1), want)
