"""Where a layer's keys and values come from: what the cache has to know of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_kvq._remat_ops import remat_attention, remat_kv
from torch_kvq._x_ops import quantize_x
from torch_kvq.cache.x_shared import CosSin
from torch_kvq.formats import PASS_THROUGH_BITS, TILE_TOKENS
from torch_kvq.reference.latent import to_latent
from torch_kvq.reference.merge import merge_attention


class Projection(NamedTuple):
    """From a layer's input to its keys and values.

    Attributes:
        key_weight: ``[kv_heads * key_dim, channels]``.
        value_weight: ``[kv_heads * value_dim, channels]``.
        key_bias: ``[kv_heads * key_dim]``.
        value_bias: ``[kv_heads * value_dim]``.
        key_norm: ``[key_dim]``, the weight of an RMS norm of every key.
        norm_eps: what this norm adds to the mean square.
    """

    key_weight: Tensor
    value_weight: Tensor
    key_bias: Tensor | None = None
    value_bias: Tensor | None = None
    key_norm: Tensor | None = None
    norm_eps: float = 0.0

    def arguments(self, kv_heads: int, cos_sin: CosSin | None) -> dict[str, Any]:
        """Arguments of the operators."""
        cos, sin = cos_sin or (None, None)
        return self._asdict() | {"kv_heads": kv_heads, "cos": cos, "sin": sin}

    def fits(self, key: Tensor, value: Tensor) -> bool:
        """Whether the weights have the rows of keys and values ``[batch, kv_heads, ..., dim]``."""
        rows = self.key_weight.shape[0], self.value_weight.shape[0]
        return rows == (key.shape[1] * key.shape[3], value.shape[1] * value.shape[3])


class Records(NamedTuple):
    """Tokens of a stream, as the operators read them.

    Attributes:
        records: uint8 ``[batch, pages, record_bytes]`` each; their sum is what is meant.
        bits: of each.
        axis: of all.
        exact: ``[batch, tokens, channels]``, the tokens behind those in pages.
    """

    records: list[Tensor]
    bits: list[int]
    axis: str
    exact: Tensor

    @property
    def tokens(self) -> int:
        """Tokens in pages and behind them."""
        return self.records[0].shape[1] * TILE_TOKENS + self.exact.shape[1]

    def as_values(self) -> dict[str, Any]:
        """Arguments of the operators, for values that are made of a stream of their own."""
        return {f"value_{name}": part for name, part in self._asdict().items()}


def rebuild(
    parts: list[Tensor], projection: Projection, kv_heads: int, cos_sin: CosSin | None
) -> tuple[Tensor, Tensor]:
    """Keys and values of exact inputs.

    Args:
        parts: inputs ``[batch, tokens, channels]``, or those of keys and of values.
        projection: the weights.
        kv_heads: heads of keys and values.
        cos_sin: cosines and sines of the tokens.

    Returns:
        ``[batch, kv_heads, tokens, key_dim]`` and ``[batch, kv_heads, tokens, value_dim]``.
    """
    tokens = parts[0].shape[1]
    records = [quantize_x(part, PASS_THROUGH_BITS) for part in parts]
    if cos_sin is not None:
        cos, sin = (F.pad(x, (0, 0, 0, -tokens % TILE_TOKENS)) for x in cos_sin)
        cos_sin = cos, sin
    key, value = remat_kv(
        records[:1],
        **projection.arguments(kv_heads, cos_sin),
        bits=[PASS_THROUGH_BITS],
        value_records=records[1:],
        value_bits=[PASS_THROUGH_BITS] * len(records[1:]),
    )
    return key[:, :, :tokens], value[:, :, :tokens]


def attend(
    query: Tensor,
    parts: Iterable[list[Records]],
    length: int,
    projection: Projection,
    kv_heads: int,
    cos_sin: CosSin | None,
    last: dict[str, Any],
    **options: Any,
) -> Tensor:
    """Attention to tokens, one part behind another.

    Args:
        query: ``[batch, heads, queries, key_dim]``.
        parts: the tokens by stream; all queries belong to the last part.
        length: tokens in all.
        projection: the weights.
        kv_heads: heads of keys and values.
        cos_sin: cosines and sines of all tokens.
        last: arguments of `torch_kvq.remat_attention` that depend on the place of a query or count
            once: they are for the last part.
        **options: those for all parts.

    Returns:
        ``[batch, heads, queries, value_dim]``.
    """
    attended, first = [], 0
    for key, *others in parts:
        end = first + key.tokens
        row = [first, end, end - first - key.exact.shape[1]]
        own = None if cos_sin is None else tokens_of(cos_sin, slice(first, end))
        attended.append(
            remat_attention(
                query,
                key.records,
                key.exact,
                key.exact.new_tensor([row], dtype=torch.int32).repeat(len(query), 1),
                **projection.arguments(kv_heads, own),
                **(others[0].as_values() if others else {}),
                **(last if end == length else {}),
                **options,
                bits=key.bits,
                axis=key.axis,
            )
        )
        first = end
    return merge_attention(attended)


def tokens_of(cos_sin: CosSin, tokens: slice) -> CosSin:
    """Cosines and sines of some tokens."""
    cos, sin = cos_sin
    return cos[:, tokens], sin[:, tokens]


class Latent(NamedTuple):
    """The weights of a layer, each split in two.

    Attributes:
        key_basis: ``[key_latents, channels]``.
        key_rest: ``[kv_heads * key_dim, key_latents]``.
        value_basis: ``[value_latents, channels]``.
        value_rest: ``[kv_heads * value_dim, value_latents]``.
    """

    key_basis: Tensor
    key_rest: Tensor
    value_basis: Tensor
    value_rest: Tensor

    def of(self, x: Tensor) -> list[Tensor]:
        """Latents of keys and of values for inputs ``[batch, tokens, channels]``."""
        return [to_latent(x, basis) for basis in (self.key_basis, self.value_basis)]

    def rest(self, projection: Projection) -> Projection:
        """What remains to be done with the latents."""
        return projection._replace(key_weight=self.key_rest, value_weight=self.value_rest)


class Rotary(Protocol):
    """A rotary embedding; equal ones give equal results."""

    def __call__(self, positions: Tensor, like: Tensor) -> CosSin:
        """Cosines and sines ``[batch, tokens, rotary_dim]`` in the dtype of ``like``."""


class Source(Protocol):
    """An attention module.

    Attributes:
        name: of the module, for errors.
        latent: its weights split by their singular values, for a cache that needs them.
    """

    name: str
    latent: Latent | None

    def projection(self, kv_heads: int, dims: tuple[int, int]) -> Projection:
        """Its weights as they are now."""

    def embedded(self, ids: Tensor) -> Tensor | None:
        """What embedding and norm make of tokens, None where the module is not the first."""

    def settle(self, x: Tensor, key: Tensor, value: Tensor, cos_sin: CosSin | None) -> None:
        """Raise ValueError unless the projection of ``x`` gives these keys and values."""


class Staged(NamedTuple):
    """What a call of an attention module was given.

    Attributes:
        x: the layer's input ``[batch, tokens, channels]``.
        cos_sin: of the new tokens, None without a rotary embedding.
        rotary: the rotary embedding that they come from.
        positions: int ``[batch or 1, tokens]``.
        ids: int ``[batch, tokens]``, the tokens, if the model was given such.
    """

    x: Tensor
    cos_sin: CosSin | None = None
    rotary: Rotary | None = None
    positions: Tensor | None = None
    ids: Tensor | None = None
