"""A layer that stores what its input differs from that of the layer below."""

from __future__ import annotations

from torch import Tensor

from torch_kvq._x_ops import dequantize_x, quantize_x
from torch_kvq.cache.x_layer import XQuantLayer
from torch_kvq.cache.x_options import XOptions
from torch_kvq.cache.x_shared import Shared
from torch_kvq.reference.cross_layer import dequantize_difference, quantize_difference


class CrossLayer(XQuantLayer):
    """Differences to the layer below as it is rebuilt, so that errors do not add up.

    What is rebuilt of a layer is handed on to the one above in ``accumulator_bits``, while a call
    of the model goes through the layers, and is dropped after the last. Differences are taken to
    what was handed on so: decoding adds up what encoding took apart.

    Args:
        options: how to store tokens.
        shared: what the layers of a cache share.
        ordinal: the place of the layer among those of the cache that store their inputs.
        below: the layer below.
        is_last: there is no layer above.
    """

    def __init__(
        self,
        options: XOptions,
        shared: Shared,
        ordinal: int,
        below: XQuantLayer,
        is_last: bool,
    ) -> None:
        super().__init__(options, shared, ordinal)
        self.below = below
        self.is_last = is_last

    def handed_on(self, first: int, last: int) -> Tensor:
        """Input of packed tokens, from which the layer above takes its differences."""
        records = self.shared.sum_of(self.ordinal, (first, last))
        if records is None:
            self.decode(first, last)
            records = self.shared.sum_of(self.ordinal, (first, last))
            assert records is not None
        bits, channels = self.options.accumulator_bits, self.state.streams[0].channels
        return dequantize_x(records, channels, bits, "token", dtype=self._like.dtype)

    def decode(self, first: int, last: int) -> list[Tensor]:
        """Packed tokens ``first`` to ``last``, whole pages of them."""
        (stream,) = self.state.streams
        below = self.below.handed_on(first, last)
        records = self.state.records(0, first, last)
        x = dequantize_difference(records, below, stream.bits, stream.axis)
        bits = self.options.accumulator_bits
        handed_on = None if self.is_last else quantize_x(x, bits, "token")
        self.shared.hand_on(self.ordinal, (first, last), handed_on)
        return [x]

    def _encode(self, oldest: list[Tensor]) -> list[Tensor]:
        (x,), (stream,) = oldest, self.state.streams
        tokens = self.state.quantized, self.state.quantized + x.shape[1]
        below = self.below.handed_on(*tokens)
        if self.is_last:
            self.shared.hand_on(self.ordinal, tokens, None)
        return [quantize_difference(x, below, stream.bits, stream.axis)]
