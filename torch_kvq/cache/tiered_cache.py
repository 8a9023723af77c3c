"""A key/value cache of two tiers for all layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch_kvq.cache.cache import CacheCore, PlainCache
from torch_kvq.cache.memory import MemoryReport
from torch_kvq.cache.packed import PackedLayer
from torch_kvq.cache.policy import LayerPolicy
from torch_kvq.cache.promotion import LayerPromotion, Promotion
from torch_kvq.cache.tier_map import TierMap
from torch_kvq.cache.tier_options import TierOptions
from torch_kvq.cache.tiered_layer import TieredLayer

_C = TypeVar("_C", bound="TieredCore")


class TieredCore(CacheCore):
    """What tiered caches have in common, with Transformers or without.

    Attributes:
        promotion: archive and promoter of all layers; None when no token is to come back.
    """

    promotion: Promotion | None

    def _make_layer(self, options: Any, index: int) -> PackedLayer:
        layer = TieredLayer.from_options(options)
        if self.promotion is not None:
            layer.promotion = LayerPromotion(index, self.promotion)
        return layer

    @property
    def tiered_layers(self) -> list[TieredLayer]:
        """The layers of two tiers."""
        return [layer for layer in self.layers if isinstance(layer, TieredLayer)]

    @property
    def promoted(self) -> int:
        """Tokens that came back from the archive so far, counted for each layer and KV head."""
        return sum(layer.promotion.promoted for layer in self.tiered_layers if layer.promotion)

    def memory_report(self) -> MemoryReport:
        """Bytes of all tensors by tier, and of fp16 keys and values for the same tokens.

        What the archive has in memory counts; what it has in a file is in ``disk_bytes``.

        Example:
            >>> import torch
            >>> cache = TieredCache(promote=False)
            >>> _ = cache.update(*torch.randn(2, 1, 8, 4096, 128).half(), layer_idx=0)
            >>> _ = cache.layers[0].attend(torch.randn(1, 8, 1, 128).half())
            >>> round(cache.memory_report().ratio, 1)
            2.0
        """
        report = super().memory_report()
        if self.promotion is None:
            return report
        archive = self.promotion.archive
        size = archive.memory_nbytes
        parts = {**report.parts, "archive": size}
        total, on_disk = report.total_bytes + size, archive.nbytes - size
        return replace(report, total_bytes=total, parts=parts, disk_bytes=on_disk)

    def tier_map(self, layer: int, row: int = 0) -> TierMap:
        """Which tokens of a row of a layer are near.

        Args:
            layer: the layer, which must be one of two tiers.
            row: of the batch.

        Raises:
            ValueError: a layer that has no tiers or no tokens, or a row that there is not.
        """
        held = self.layers[layer] if -len(self.layers) <= layer < len(self.layers) else None
        if not isinstance(held, TieredLayer):
            raise ValueError(f"layer must have two tiers, got {layer} of {len(self.layers)} layers")
        held.flush()
        if held.state is None:
            raise ValueError(f"layer {layer} must hold tokens, got none")
        return TierMap.of(held.state, row)

    def plot_tiers(self, layer: int, row: int = 0, axes: Any = None) -> Any:
        """Draw which tokens each KV head of a layer has near; needs matplotlib.

        Args:
            layer: the layer, which must be one of two tiers.
            row: of the batch.
            axes: matplotlib axes to draw on; those of a new figure when not given.

        Returns:
            The figure; ``figure.savefig("tiers.png")`` writes the picture.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: as of `tier_map`.
        """
        return self.tier_map(layer, row).plot(axes, title=f"layer {layer}")

    def fork(self: _C) -> _C:
        """Another cache with the same tokens, see `CacheCore.fork`; its archive shares pages."""
        fork = super().fork()
        if self.promotion is not None:
            fork.promotion = self.promotion.fork()
            for layer, own in zip(fork.tiered_layers, self.tiered_layers, strict=True):
                if own.promotion is not None:
                    promoted, index = own.promotion.promoted, own.promotion.index
                    layer.promotion = LayerPromotion(index, fork.promotion, promoted)
        return fork

    def close(self) -> None:
        """Give up the archive; the cache goes on without it."""
        promotion, self.promotion = self.promotion, None
        for layer in self.tiered_layers:
            layer.promotion = None
        if promotion is not None:
            promotion.close()


def tier_options(
    near_ratio: float,
    far: str,
    sink_tokens: int,
    window: int,
    quantized_start: int,
    observed_queries: int,
    strict: bool,
) -> TierOptions:
    """Options from the arguments of a cache."""
    return TierOptions(
        near_ratio=near_ratio,
        far=far,
        sink_tokens=sink_tokens,
        residual_length=window,
        quantized_start=quantized_start,
        observed_queries=observed_queries,
        strict=strict,
    )


class TieredCache(TieredCore, PlainCache):
    """Keys and values of a model in two tiers, without Transformers.

    `update` returns handles that ``torch.nn.functional.scaled_dot_product_attention`` and
    `TieredLayer.attend` read. Where Transformers is installed, ``torch_kvq.TieredCache`` is a
    Transformers cache with the same options.

    Args:
        near_ratio: as in `TieredLayer`, like the next ones.
        far: format of the far tier.
        sink_tokens: first tokens of a row that stay near.
        window: recent tokens that stay near.
        quantized_start: tokens up to which all are near.
        observed_queries: last queries of a prompt, which choose its near tokens.
        promote: as in `Promotion.make`, like the next ones.
        archive: path of the archive.
        archive_budget: bytes of the archive.
        archive_in_memory: keep it in memory.
        cooldown: steps between two tokens of a layer and KV head.
        promotions: tokens of a layer in a step.
        margin: by which a log weight has to exceed the median use of the chosen near tokens.
        config: must be None: the layout of a Transformers model takes Transformers.
        strict: raise where keys or values would have to be decoded.
        skip_layers: layers that are stored without loss; here they cannot count from the last.

    Example:
        >>> import torch
        >>> cache = TieredCache(promote=False)
        >>> key, value = cache.update(*torch.randn(2, 1, 8, 400, 64), layer_idx=0)
        >>> query = torch.randn(1, 8, 400, 64)
        >>> attention = torch.nn.functional.scaled_dot_product_attention
        >>> attention(query, key, value, is_causal=True).shape
        torch.Size([1, 8, 400, 64])
        >>> cache
        TieredCache(near_ratio=0.1, far='fp8-int4', layers=1, tokens=400, bytes=745024)
    """

    def __init__(
        self,
        near_ratio: float = 0.1,
        far: str = "fp8-int4",
        *,
        sink_tokens: int = 4,
        window: int = 32,
        quantized_start: int = 256,
        observed_queries: int = 32,
        promote: bool | Literal["sync"] = True,
        archive: str | Path | None = None,
        archive_budget: int | None = None,
        archive_in_memory: bool = False,
        cooldown: int = 5,
        promotions: int = 8,
        margin: float = 1.0,
        config: None = None,
        strict: bool = False,
        skip_layers: Sequence[int] = (),
    ) -> None:
        if config is not None:
            raise ValueError("config needs transformers, which is not installed")
        self._set_options(
            tier_options(
                near_ratio, far, sink_tokens, window, quantized_start, observed_queries, strict
            ),
            LayerPolicy.parse(skip_layers),
        )
        self.promotion = Promotion.make(
            promote,
            archive,
            budget=archive_budget,
            in_memory=archive_in_memory,
            cooldown=cooldown,
            promotions=promotions,
            margin=margin,
        )
        self.layers = []
