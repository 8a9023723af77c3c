"""A layer that stores what its input differs from that of the layer below."""

from __future__ import annotations

from torch import Tensor

from torch_kvq._x_ops import quantize_x, sum_x
from torch_kvq.cache.x_layer import XQuantLayer
from torch_kvq.cache.x_options import XOptions
from torch_kvq.cache.x_shared import Shared
from torch_kvq.cache.x_source import Records
from torch_kvq.formats import PASS_THROUGH_BITS
from torch_kvq.reference.cross_layer import quantize_difference, sum_of_records


class CrossLayer(XQuantLayer):
    """Differences to the layer below as it is rebuilt, so that errors do not add up.

    What is rebuilt of a layer is handed on to the one above in ``accumulator_bits``, while a call
    of the model goes through the layers, and is dropped after the last. Differences are taken to
    what was handed on so: decoding adds up what encoding took apart.

    Args:
        options: how to store tokens.
        shared: what the layers of a cache share.
        ordinal: the place of the layer among those of the cache that store their inputs.
        is_last: no layer above stores its input.
        below: the layer below.
    """

    def __init__(
        self,
        options: XOptions,
        shared: Shared,
        ordinal: int,
        is_last: bool,
        below: XQuantLayer,
    ) -> None:
        super().__init__(options, shared, ordinal, is_last)
        self.below = below

    def handed_on(self, first: int, last: int) -> Records:
        """Input of packed tokens, from which the layer above takes its differences."""
        bits, axis = self.options.accumulator_bits, self.options.group_axis
        records = self.shared.sum_of(self.ordinal, (first, last))
        if records is None:
            records = self._added(self._sum(first, last), bits)
            self.shared.hand_on(self.ordinal, (first, last), records)
        return Records([records], [bits], axis, self.state.tails[0])

    def _added(self, parts: Records, bits: int) -> Tensor:
        channels, dtype = parts.exact.shape[2], parts.exact.dtype
        if PASS_THROUGH_BITS not in (bits, *parts.bits):
            return sum_x(parts.records, channels, parts.bits, bits, parts.axis)
        x = sum_of_records(parts.records, channels, parts.bits, parts.axis, dtype)
        return quantize_x(x, bits, parts.axis)

    def decode(self, first: int, last: int) -> list[Tensor]:
        """Packed tokens, whole pages of them, see `XState.records`."""
        records, bits, axis, like = self._sum(first, last)
        return [sum_of_records(records, like.shape[2], bits, axis, like.dtype)]

    def _sum(self, first: int, last: int) -> Records:
        """What the layer below hands on, and the difference to it."""
        below = self.below.handed_on(first, last)
        own = self.state.records(0, first, last)
        return below._replace(
            records=[*below.records, own], bits=[*below.bits, self.state.streams[0].bits]
        )

    def _stored(self) -> list[Records]:
        return [self._sum(0, self.state.quantized)._replace(exact=self.state.recent[0])]

    def _encode(self, oldest: list[Tensor]) -> list[Tensor]:
        (x,), (stream,) = oldest, self.state.streams
        tokens = self.state.quantized, self.state.quantized + x.shape[1]
        below = self.below.handed_on(*tokens)
        return [quantize_difference(x, below.records, below.bits, stream.bits, stream.axis)]
