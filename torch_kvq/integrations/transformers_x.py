"""`XQuantCache`: inputs of layers in the place of their keys and values."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, cast

from torch_kvq.cache import aliases
from torch_kvq.cache.policy import LayerPolicy
from torch_kvq.cache.x_bytes import LayerDims, bytes_per_token, fewest_bytes
from torch_kvq.cache.x_cross import CrossLayer
from torch_kvq.cache.x_embedded import EmbeddedLayer
from torch_kvq.cache.x_latent import LatentLayer
from torch_kvq.cache.x_layer import XQuantLayer
from torch_kvq.cache.x_options import XOptions
from torch_kvq.cache.x_shared import Shared
from torch_kvq.cache.x_source import Staged
from torch_kvq.integrations.estimate import kv_heads
from torch_kvq.integrations.input_hooks import Attachment
from torch_kvq.integrations.latent import split_all
from torch_kvq.integrations.transformers import install
from torch_kvq.integrations.transformers_layout import (
    TransformersCache,
    decoder_config,
    head_dims,
)

_log = logging.getLogger("torch_kvq")

_C = TypeVar("_C", bound="XQuantCache")


class XQuantCache(TransformersCache):
    """A Transformers cache of what goes into attention layers, in the place of keys and values.

    A layer's input has fewer channels than its keys and values where no heads share them. Keys and
    values are made of it anew at every step, in blocks: the cache takes fewer bytes for more
    arithmetic. Where heads share keys and values (GQA), a `KVQCache` is smaller and faster, and the
    cache says so.

    Hooks of the model catch the inputs while a cache is bound to it. ``generate`` binds a cache;
    for a model that is called otherwise, give it ``model=model`` or call `bind`. The first layer
    stores token numbers in the modes ``"x"`` and ``"cl"`` where embedding and norm give its input
    exactly. Layers that a `KVQCache` leaves to Transformers are left to it here, too, and so is
    every sliding window. It grows; graphs that are compiled break at it.

    A pickled cache has what it stores and nothing of the model: one that was loaded is bound like a
    new one.

    Args:
        bits: 2, 3, 4, 8 or 16 (pass-through) for a stored element.
        mode: ``"x"`` stores inputs, ``"cl"`` their differences from layer to layer, ``"latent"``
            their coordinates in the row spaces of the key and value weights, which are split once
            and kept in the user's cache; ``"auto"`` takes the mode of fewest bytes.
        axis: what a scale is shared by: 64 channels of a ``"token"``, or 64 tokens of a
            ``"channel"``; ``"auto"`` is ``"token"``.
        sink_tokens: first tokens that stay exact, left padding included.
        residual_length: recent tokens that stay exact; up to 63 more do.
        first_layers: layers of ``"cl"`` that store their input, at no less than 4 bits.
        accumulator_bits: bits of the sum of differences that goes from layer to layer.
        absorb_value: apply the weight of the values to what attention sums up, instead of to every
            input; where that costs less when None.
        strict: raise a RuntimeError where whole keys and values would have to be made, for a model
            that does not use Transformers' attention functions.
        skip_layers: layers that keep Transformers' own; negative ones count from the last.
        config: configuration of the model, to lay the cache out before `bind`.
        model: the model, for a cache that is not handed to ``generate``.
        **unknown: nothing else is accepted.

    Attributes:
        mode: the mode that was taken.
        bytes_per_token: of a token in pages, by mode, for a ``"KVQCache"`` and for ``"fp16"``
            (`torch_kvq.cache.x_bytes.bytes_per_token`), once the model is known.

    Raises:
        ValueError: an option outside the above, or a model whose keys and values cannot be made of
            its layers' inputs.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=128, intermediate_size=128, num_attention_heads=4, vocab_size=100,
        ...     num_hidden_layers=2, num_key_value_heads=4, eos_token_id=None, pad_token_id=0))
        >>> cache = XQuantCache(bits=4)
        >>> _ = model.generate(torch.ones(1, 300, dtype=torch.long), past_key_values=cache,
        ...                    max_new_tokens=5, do_sample=False)
        >>> cache.mode, cache.get_seq_length(), cache.materialized
        ('x', 304, 0)
        >>> round(cache.bytes_per_token["fp16"] / cache.bytes_per_token["x"], 1)
        7.3
    """

    options: Any

    def __init__(
        self,
        bits: int = 4,
        *,
        mode: str = "auto",
        axis: str = "auto",
        sink_tokens: int = 4,
        residual_length: int = 128,
        first_layers: int = 3,
        accumulator_bits: int = 4,
        absorb_value: bool | None = None,
        strict: bool = False,
        skip_layers: Sequence[int] = (),
        config: Any = None,
        model: Any = None,
        **unknown: NoReturn,
    ) -> None:
        install()
        aliases.refuse(unknown, "XQuantCache", "kvq-x")
        self._shared = Shared()
        self._attachment: Attachment | None = None
        self.bytes_per_token: dict[str, float] = {}
        options = XOptions(
            bits,
            mode,
            axis,
            sink_tokens,
            residual_length,
            first_layers,
            accumulator_bits,
            absorb_value,
            strict,
        )
        self._set_up(cast(Any, options), LayerPolicy.parse(skip_layers), config=config)
        if model is not None:
            self.bind(model)

    def bind(self, model: Any, max_length: int | None = None) -> None:
        """Take the layers of a model and catch their inputs; ``generate`` does this by itself."""
        if model.config.is_encoder_decoder:
            raise ValueError(
                f"{type(model).__name__} has an encoder: a cache of layer inputs serves decoders"
            )
        self._attachment = Attachment.of(model, _given)
        super().bind(model, max_length)
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, XQuantLayer):
                continue
            if index not in self._attachment.sources:
                raise self._attachment.refused.get(index) or ValueError(
                    f"layer {index} of {type(model).__name__} has no attention module with "
                    "projections that are known (k_proj and v_proj, or fused ones); put it into "
                    "skip_layers or use KVQCache"
                )
            layer.attach(self._attachment.sources[index])
        latent = [
            (layer.source, (dims.kv_heads, (dims.key_dim, dims.value_dim)))
            for layer, dims in zip(self.packed_layers, self._dims(model.config), strict=True)
            if isinstance(layer, LatentLayer)
        ]
        if latent:
            split_all(*zip(*latent, strict=True))

    def stores_input(self, index: int) -> bool:
        """Whether a layer is one that stores its input."""
        return index < len(self.layers) and isinstance(self.layers[index], XQuantLayer)

    def stage(self, index: int, staged: Staged) -> None:
        """Take the input of a layer that stores it; the hooks of the model call this."""
        self.layers[index].stage(staged)

    def _make_layer(self, options: Any, index: int) -> XQuantLayer:
        return XQuantLayer(options, self._shared)

    def _lay_out(self, config: Any) -> None:
        super()._lay_out(config)
        dims = self._dims(config)
        self.bytes_per_token = sizes = bytes_per_token(self.options, dims)
        mode = self.options.mode
        self.mode = fewest_bytes(sizes) if mode == "auto" else mode
        if dims:
            self._report(sizes)
        layers: list[XQuantLayer] = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, XQuantLayer):
                self.layers[index] = self._layer_of_mode(index, layers, len(dims))
                layers.append(self.layers[index])

    def _layer_of_mode(self, index: int, below: list[XQuantLayer], count: int) -> XQuantLayer:
        """The next layer that stores its input."""
        options, ordinal = self.options, len(below)
        place = self._shared, ordinal, ordinal == count - 1
        if self.mode == "latent":
            layer: XQuantLayer = LatentLayer(options, *place)
        elif self.mode == "cl" and ordinal >= options.first_layers:
            layer = CrossLayer(options, *place, below[-1])
        else:
            if self.mode == "cl":
                options = options.with_bits(options.first_bits)
            kind = XQuantLayer if index else EmbeddedLayer
            layer = kind(options, *place)
        layer.said = self._said
        return layer

    def _dims(self, config: Any) -> list[LayerDims]:
        sources = {} if self._attachment is None else self._attachment.sources
        dims = []
        for index, own in enumerate(decoder_config(config).per_layer_config[: len(self.layers)]):
            if isinstance(self.layers[index], XQuantLayer):
                pair, source = head_dims(own), sources.get(index)
                heads = kv_heads(own) if source is None else source.kv_heads(own, pair)
                dims.append(LayerDims(own.hidden_size, heads, *pair))
        return dims

    def _report(self, sizes: dict[str, float]) -> None:
        """Say what a token takes, once for each layout."""
        said = f"{self.mode} {sizes}"
        if said in self._said:
            return
        self._said.add(said)
        _log.info(
            "mode %r at %d bits%s; bytes per token: %s",
            self.mode,
            self.options.bits,
            ", which takes the fewest bytes" if self.options.mode == "auto" else "",
            ", ".join(f"{name} {size:.0f}" for name, size in sizes.items()),
        )
        if sizes["KVQCache"] < sizes[self.mode]:
            _log.warning(
                "keys and values of this model take %.0f bytes per token in a KVQCache, layer "
                "inputs %.0f in mode %r: a KVQCache is smaller and faster",
                sizes["KVQCache"],
                sizes[self.mode],
                self.mode,
            )

    def flush(self) -> None:
        """Pack the tokens that are due in all layers, from the first on."""
        for layer in self.packed_layers:
            layer.flush()

    def crop(self, max_length: int) -> None:
        """Remove the last tokens, see `KVQCache.crop`."""
        self.flush()
        # A page that is cut is decoded, for which the layers below must be whole.
        for layer in reversed(self.layers):
            layer.crop(max_length)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Let row i become what row ``beam_idx[i]`` is."""
        self.flush()
        super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self.flush()
        super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep the rows ``indices`` in this order."""
        self.flush()
        super().batch_select_indices(indices)

    def fork(self: _C) -> _C:
        """Another cache with the same tokens, see `KVQCache.fork`."""
        fork = super().fork()
        fork._shared = self._shared.fork()
        below: XQuantLayer | None = None
        for layer in fork.layers:
            if not isinstance(layer, XQuantLayer):
                continue
            layer.shared = fork._shared
            if isinstance(layer, CrossLayer):
                assert below is not None
                layer.below = below
            below = layer
        return fork


def _given(value: Any) -> XQuantCache | None:
    """The cache of layer inputs that an argument of a module is, or has in it."""
    own = getattr(value, "self_attention_cache", value)
    return own if isinstance(own, XQuantCache) else None
