"""Which layers of a model are packed, and with how many bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch_kvq.cache.options import LayerOptions, RowOptions

_O = TypeVar("_O", bound=RowOptions)


@dataclass(frozen=True)
class LayerPolicy:
    """Layers that are not treated like the others.

    Attributes:
        skip_layers: layers that are not packed; negative ones count from the last.
        layer_bits: options of single layers in the place of the common bits, by layer.

    Example:
        >>> policy = LayerPolicy.parse(skip_layers=(0, -1), layer_bits={1: "4/3"})
        >>> policy
        LayerPolicy(skip_layers=(0, -1), layer_bits={1: '4/3'})
        >>> [options and options.bits for options in policy.resolve(LayerOptions(2, 2), layers=4)]
        [None, '4/3', '2', None]
    """

    skip_layers: tuple[int, ...] = ()
    layer_bits: dict[int, str] = field(default_factory=dict)

    @classmethod
    def parse(
        cls,
        skip_layers: Sequence[int] = (),
        layer_bits: Mapping[int, int | str] | None = None,
    ) -> LayerPolicy:
        """A policy from the arguments of a cache.

        Args:
            skip_layers: layers that are not packed; negative ones count from the last.
            layer_bits: bits by layer, each 2, 3, 4, 16 or a text like ``"4/3"``.

        Raises:
            TypeError: a layer that is not an int, or another type of argument.
            ValueError: bits that do not exist, or a layer in both.
        """
        if isinstance(skip_layers, str) or not isinstance(skip_layers, Sequence):
            raise TypeError(f"skip_layers must be a sequence of ints, got {skip_layers!r}")
        if not isinstance(layer_bits or {}, Mapping):
            raise TypeError(f"layer_bits must be a dict like {{0: 4}}, got {layer_bits!r}")
        own = dict(layer_bits or {})
        for name, layers in (("skip_layers", skip_layers), ("layer_bits", own)):
            for layer in layers:
                if not isinstance(layer, int) or isinstance(layer, bool):
                    raise TypeError(f"{name} must name layers by ints, got {layer!r}")
        policy = cls(tuple(skip_layers), {layer: _bits(layer, own[layer]) for layer in own})
        policy._check_once(policy.skip_layers + tuple(own))
        return policy

    def resolve(self, options: _O, layers: int) -> list[_O | None]:
        """Options of every layer of a model, None for those that are not packed.

        Args:
            options: of a layer that is treated like the others.
            layers: how many layers the model has.

        Raises:
            ValueError: a layer that the model does not have, or one that is named twice.
        """
        for name, named in (("skip_layers", self.skip_layers), ("layer_bits", self.layer_bits)):
            for layer in named:
                if not -layers <= layer < layers:
                    raise ValueError(
                        f"{name} must name layers from {-layers} to {layers - 1} of a model with "
                        f"{layers} layers, got {layer}"
                    )
        self._check_once(layer % layers for layer in (*self.skip_layers, *self.layer_bits))
        resolved: list[_O | None] = [options] * layers
        for layer, bits in self.layer_bits.items():
            resolved[layer] = _with_bits(options, bits)
        for layer in self.skip_layers:
            resolved[layer] = None
        return resolved

    def resolve_one(self, options: _O, layer: int) -> _O | None:
        """Options of a layer of a model whose number of layers is not known.

        Raises:
            ValueError: the policy counts from the last layer.
        """
        from_last = [named for named in (*self.skip_layers, *self.layer_bits) if named < 0]
        if from_last:
            raise ValueError(
                f"skip_layers and layer_bits that count from the last layer, got {from_last[0]}, "
                "need the model: use generate() or give the cache config=model.config"
            )
        if layer in self.skip_layers:
            return None
        bits = self.layer_bits.get(layer)
        return options if bits is None else _with_bits(options, bits)

    def _check_once(self, layers: Iterable[int]) -> None:
        counts = Counter(layers)
        twice = [layer for layer, count in counts.items() if count > 1]
        if twice:
            raise ValueError(
                f"skip_layers={self.skip_layers} and layer_bits={self.layer_bits} must name a "
                f"layer once, got layer {twice[0]} again"
            )

    def __str__(self) -> str:
        """The arguments that make this policy, as a part of a call."""
        parts = {"skip_layers": self.skip_layers, "layer_bits": self.layer_bits}
        return ", ".join(f"{name}={value}" for name, value in parts.items() if value)


def _bits(layer: int, bits: int | str) -> str:
    try:
        return LayerOptions.parse(bits).bits
    except ValueError as error:
        raise ValueError(f"layer_bits[{layer}]: {error}") from None


def _with_bits(options: _O, bits: str) -> _O:
    parsed = LayerOptions.parse(bits)
    changes: dict[str, Any] = {"key_bits": parsed.key_bits, "value_bits": parsed.value_bits}
    return replace(options, **changes)
