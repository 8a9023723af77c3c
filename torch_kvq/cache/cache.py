"""A packed key/value cache for all layers of a model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from torch_kvq.cache import aliases
from torch_kvq.cache.layer import KVQLayer
from torch_kvq.cache.memory import MemoryReport, tensor_bytes
from torch_kvq.cache.options import LayerOptions, RowOptions
from torch_kvq.cache.packed import PackedLayer
from torch_kvq.cache.policy import LayerPolicy

_C = TypeVar("_C", bound="CacheCore")


class CacheCore:
    """What packed caches have in common, with Transformers or without.

    Attributes:
        layers: `PackedLayer` or, where a model has other kinds of layers, those of Transformers.
        options: how the packed layers store tokens.
        policy: the layers that are not treated like the others.
        static: layers are allocated at once.
    """

    layers: list[Any]

    def _set_options(self, options: RowOptions, policy: LayerPolicy, static: bool = False) -> None:
        self.options = options
        self.policy = policy
        self.static = static or options.max_cache_len is not None
        self._is_laid_out = False
        self._said: set[str] = set()

    def update(
        self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Append the new keys and values of a layer.

        Args:
            key: ``[batch, kv_heads, tokens, key_dim]``, float32, float16 or bfloat16.
            value: ``[batch, kv_heads, tokens, value_dim]`` in the same dtype.
            layer_idx: the layer.
            *args: for layers of Transformers.
            **kwargs: for layers of Transformers.

        Returns:
            Handles of the layer's keys and values, for attention functions
            (`torch_kvq.cache.handle.KVQHandle`).

        Raises:
            ValueError: shapes, a dtype or layers that do not fit what the cache holds.
            IndexError: more tokens than ``max_cache_len``.
        """
        if layer_idx >= len(self.layers):
            self._add_layers(layer_idx, key.shape[2])
        elif layer_idx == 0:
            self._check_level()
        return self.layers[layer_idx].update(key, value, *args, **kwargs)

    def _add_layers(self, layer_idx: int, tokens: int) -> None:
        """Make layers up to ``layer_idx`` for the first call of a model."""
        held = len(self.layers)
        if self._is_laid_out:
            raise ValueError(
                f"the cache was laid out for {held} layers, got layer_idx={layer_idx}: a cache "
                "belongs to one model"
            )
        first = self.layers[0] if held else None
        if first is not None and not self.static and first.get_seq_length() != tokens:
            raise ValueError(
                f"the cache holds {first.get_seq_length()} positions in {held} layers, got "
                f"layer_idx={layer_idx}: a cache belongs to one model, call reset() before it is "
                "used for another"
            )
        for index in range(held, layer_idx + 1):
            options = self.policy.resolve_one(self.options, index)
            self.layers.append(
                self._skipped() if options is None else self._new_layer(options, index)
            )

    def _skipped(self) -> Any:
        """A layer of ``skip_layers``."""
        return KVQLayer(16, max_cache_len=self.options.max_cache_len)

    def _new_layer(self, options: RowOptions | None = None, index: int = 0) -> PackedLayer:
        """A layer that is not skipped."""
        if self.static and self.options.max_cache_len is None:
            raise ValueError(
                "static=True needs max_cache_len; only generate() finds it out for itself"
            )
        layer = self._make_layer(options or self.options, index)
        layer.said = self._said
        return layer

    def _make_layer(self, options: Any, index: int) -> PackedLayer:
        return KVQLayer.from_options(options)

    def _check_level(self) -> None:
        """Raise when the last call of the model did not get through all layers."""
        # Two lengths that a graph knows to be one are more than inductor 2.13 can name.
        is_exempt = self.static or torch.compiler.is_compiling()
        if is_exempt or not isinstance(self.layers[0], PackedLayer):
            return
        first = self.layers[0].visible_length
        for index in (1, len(self.layers) - 1):
            layer = self.layers[index] if index < len(self.layers) else None
            if not isinstance(layer, PackedLayer) or layer.visible_length == first:
                continue
            # A last layer without tokens may be one that shares the keys of another.
            if layer.visible_length or index == 1:
                raise ValueError(
                    f"layer 0 holds {first} positions and layer {index} {layer.visible_length}: a "
                    "call of the model was interrupted or the model has fewer layers; crop() all "
                    "layers to one length or reset() the cache"
                )

    @property
    def packed_layers(self) -> list[PackedLayer]:
        """The layers that are packed."""
        return [layer for layer in self.layers if isinstance(layer, PackedLayer)]

    @property
    def holds_tokens(self) -> bool:
        """Whether any packed layer has tokens, or one of Transformers' memory for some."""
        return any(
            not layer.is_empty
            if isinstance(layer, PackedLayer)
            else any(tensor.dim() for tensor in _tensors(vars(layer)))
            for layer in self.layers
        )

    @property
    def materialized(self) -> int:
        """How often keys and values were decoded for code that does not attend to them packed."""
        return sum(layer.materialized for layer in self.packed_layers)

    def memory_report(self) -> MemoryReport:
        """Bytes of all tensors of the cache, and of fp16 keys and values for the same tokens.

        Example:
            >>> cache = KVQCache(bits=4)
            >>> _ = cache.update(*torch.randn(2, 1, 8, 4096, 128), layer_idx=0)
            >>> _ = cache.layers[0].attend(torch.randn(1, 8, 1, 128))
            >>> round(cache.memory_report().ratio, 1)
            3.1
        """
        parts, fp16_bytes = [], 0
        for layer in self.layers:
            if isinstance(layer, PackedLayer):
                parts.append(layer.memory_parts())
                fp16_bytes += layer.fp16_bytes
            else:
                tensors = _tensors(vars(layer))
                size = sum(map(tensor_bytes, tensors))
                parts.append({"other layers": size} if size else {})
                fp16_bytes += sum(2 * x.numel() for x in tensors if x.is_floating_point())
        tokens = max((layer.tokens for layer in self.packed_layers), default=0)
        return MemoryReport.collect(parts, fp16_bytes, tokens)

    def fork(self: _C) -> _C:
        """Another cache with the same tokens; both go on without regard to each other.

        To give one prompt several answers, for less than a ``copy.deepcopy`` takes: packed layers
        share their full pages (`CacheLayer.fork`), while those of Transformers and those of a
        static cache are copied.

        Returns:
            A cache of the same class.

        Example:
            >>> cache = KVQCache(bits=4)
            >>> _ = cache.update(*torch.randn(2, 1, 8, 300, 64), layer_idx=0)
            >>> answers = [cache.fork() for _ in range(3)]
            >>> _ = answers[0].update(*torch.randn(2, 1, 8, 20, 64), layer_idx=0)
            >>> [answer.get_seq_length() for answer in answers]
            [320, 300, 300]
        """
        fork = copy.copy(self)
        fork.layers = [
            layer.fork() if isinstance(layer, PackedLayer) else copy.deepcopy(layer)
            for layer in self.layers
        ]
        return fork

    def __repr__(self) -> str:
        report = self.memory_report()
        others = len(self.layers) - len(self.packed_layers)
        layers = f"{len(self.layers)}" + (f" ({others} not packed)" if others else "")
        policy = f"{self.policy}, " if str(self.policy) else ""
        return (
            f"{type(self).__name__}({self.options.summary}, {policy}layers={layers}, "
            f"tokens={report.tokens}, bytes={report.total_bytes})"
        )


class PlainCache(CacheCore):
    """What a cache without Transformers does with all of its layers."""

    def __len__(self) -> int:
        return len(self.layers)

    def get_seq_length(self, layer_idx: int = 0) -> int | Tensor:
        """Positions so far, left padding included; a tensor in a static cache."""
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

    def crop(self, tokens: int) -> None:
        """Remove the last tokens: ``-tokens`` of them, or all but the first ``tokens``."""
        for layer in self.layers:
            layer.crop(tokens)

    def reset(self) -> None:
        """Forget all tokens."""
        for layer in self.layers:
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i become what row ``beam_idx[i]`` is."""
        for layer in self.layers:
            layer.reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        for layer in self.layers:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` in this order."""
        for layer in self.layers:
            layer.batch_select_indices(indices)


class KVQCache(PlainCache):
    """Keys and values of a model, packed and attended while they stay packed, without Transformers.

    `update` returns handles that ``torch.nn.functional.scaled_dot_product_attention`` and
    `KVQLayer.attend` read packed. Where Transformers is installed, ``torch_kvq.KVQCache`` is a
    Transformers cache with the same options.

    Args:
        bits: 2, 3, 4, 16 (pass-through) or a text like ``"4/3"``, keys first.
        key_bits: bits of the keys, overrides ``bits``.
        value_bits: bits of the values, overrides ``bits``; at most ``key_bits``.
        sink_tokens: first tokens of a sequence that stay exact.
        residual_length: recent tokens that stay exact; up to 63 more do.
        quantized_start: tokens up to which nothing is packed.
        max_cache_len: positions to allocate at once; the cache grows when not given.
        static: allocate at once, needs ``max_cache_len``.
        config: must be None: the layout of a Transformers model takes Transformers.
        strict: raise where keys or values would have to be decoded.
        skip_layers: layers that are stored without loss; here they cannot count from the last.
        layer_bits: bits of single layers, such as ``{0: 4, 1: "4/3"}``.
        **unknown: nothing else is accepted.

    Example:
        >>> cache = KVQCache(bits="4/3")
        >>> key, value = cache.update(*torch.randn(2, 1, 8, 400, 64), layer_idx=0)
        >>> query = torch.randn(1, 8, 400, 64)
        >>> attention = torch.nn.functional.scaled_dot_product_attention
        >>> attention(query, key, value, is_causal=True).shape
        torch.Size([1, 8, 400, 64])
        >>> cache.get_seq_length()
        400
    """

    def __init__(
        self,
        bits: int | str = 4,
        *,
        key_bits: int | None = None,
        value_bits: int | None = None,
        sink_tokens: int = 4,
        residual_length: int = 64,
        quantized_start: int = 256,
        max_cache_len: int | None = None,
        static: bool = False,
        config: None = None,
        strict: bool = False,
        skip_layers: Sequence[int] = (),
        layer_bits: Mapping[int, int | str] | None = None,
        **unknown: NoReturn,
    ) -> None:
        aliases.refuse(unknown)
        self._set_options(
            LayerOptions.parse(
                bits,
                key_bits=key_bits,
                value_bits=value_bits,
                sink_tokens=sink_tokens,
                residual_length=residual_length,
                quantized_start=quantized_start,
                max_cache_len=max_cache_len,
                strict=strict,
            ),
            LayerPolicy.parse(skip_layers, layer_bits),
            static,
        )
        if config is not None:
            raise ValueError("config needs transformers, which is not installed")
        if static and max_cache_len is None:
            raise ValueError("static=True needs max_cache_len, got None")
        self.layers = []


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in nested dicts and sequences."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
