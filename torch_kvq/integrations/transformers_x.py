"""`XQuantCache`: inputs of layers in the place of their keys and values."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from transformers.cache_utils import Cache

from torch_kvq.cache import aliases
from torch_kvq.cache.policy import LayerPolicy
from torch_kvq.cache.x_layer import XQuantLayer
from torch_kvq.cache.x_options import XOptions
from torch_kvq.cache.x_shared import Shared
from torch_kvq.cache.x_source import Staged
from torch_kvq.integrations.projections import Attachment
from torch_kvq.integrations.transformers import KVQCache, install

_log = logging.getLogger("torch_kvq")

_C = TypeVar("_C", bound="XQuantCache")


class XQuantCache(KVQCache):
    """A Transformers cache of what goes into attention layers."""

    options: Any

    def __init__(
        self,
        bits: int = 4,
        *,
        mode: str = "auto",
        axis: str = "auto",
        residual_length: int = 128,
        first_layers: int = 3,
        accumulator_bits: int = 4,
        strict: bool = False,
        skip_layers: Sequence[int] = (),
        model: Any = None,
        **unknown: NoReturn,
    ) -> None:
        install()
        aliases.refuse(unknown)
        self.options = XOptions(
            bits,
            mode,
            axis,
            residual_length,
            first_layers,
            accumulator_bits=accumulator_bits,
            strict=strict,
        )
        self.policy = LayerPolicy.parse(skip_layers)
        self.static = self._fits_itself = self._is_laid_out = False
        self._said: set[str] = set()
        self._shared = Shared()
        self._attachment: Attachment | None = None
        Cache.__init__(self, layers=[])
        if model is not None:
            self.bind(model)

    def bind(self, model: Any, max_length: int | None = None) -> None:
        """Take the layers of a model and catch their inputs; ``generate`` does this by itself."""
        if model.config.is_encoder_decoder:
            raise ValueError(
                f"{type(model).__name__} has an encoder: a cache of layer inputs serves decoders"
            )
        super().bind(model, max_length)
        if self._attachment is None or self._attachment.model() is not model:
            self._attachment = Attachment(model, _given)
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, XQuantLayer):
                continue
            if index not in self._attachment.sources:
                raise ValueError(
                    f"layer {index} of {type(model).__name__} has no attention module with "
                    "projections that are known (k_proj and v_proj, or fused ones); put it into "
                    "skip_layers or use KVQCache"
                )
            layer.attach(self._attachment.sources[index])

    def stage(self, index: int, staged: Staged) -> None:
        """Take the input of a layer; the hooks of the model call this."""
        layer = self.layers[index] if index < len(self.layers) else None
        if isinstance(layer, XQuantLayer):
            layer.stage(staged)

    def _new_layer(self, options: Any = None) -> Any:
        layer = XQuantLayer(options or self.options, self._shared)
        layer.said = self._said
        return layer

    def _lay_out(self, config: Any) -> None:
        super()._lay_out(config)
        for ordinal, layer in enumerate(self.packed_layers):
            layer.ordinal = ordinal

    def fork(self: _C) -> _C:
        """Another cache with the same tokens, see `KVQCache.fork`."""
        fork = super().fork()
        fork._shared = self._shared.fork()
        for layer in fork.packed_layers:
            layer.shared = fork._shared
        return fork


def _given(value: Any) -> XQuantCache | None:
    """The cache of layer inputs that an argument of a module is, or has in it."""
    own = getattr(value, "self_attention_cache", value)
    return own if isinstance(own, XQuantCache) else None
