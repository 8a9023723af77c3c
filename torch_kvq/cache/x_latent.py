"""A layer that stores its input in the row spaces of its key and value weights."""

from __future__ import annotations

from torch import Tensor

from torch_kvq.cache.x_layer import XQuantLayer
from torch_kvq.cache.x_source import Latent, Projection, Staged
from torch_kvq.cache.x_state import Stream


class LatentLayer(XQuantLayer):
    """Two coordinates of every input, one for the keys and one for the values.

    With grouped queries these are fewer channels than the input has, and as many as keys and
    values have. Nothing is lost beside the bits of the codes.
    """

    def streams(self, channels: int) -> list[Stream]:
        """The latents of keys and of values."""
        latent, axis, bits = self._latent, self.options.group_axis, self.options.bits
        return [Stream(len(x), bits, axis) for x in (latent.key_basis, latent.value_basis)]

    @property
    def _latent(self) -> Latent:
        source = self._bound()
        if source.latent is None:
            raise ValueError(f"{source.name} was not split by its singular values")
        return source.latent

    def _parts_of(self, staged: Staged) -> list[Tensor]:
        return self._latent.of(staged.x)

    def _projection(self) -> Projection:
        return self._latent.rest(super()._projection())
