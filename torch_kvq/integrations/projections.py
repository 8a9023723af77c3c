"""Attention modules of a model and their projections."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torch_kvq.cache.x_shared import CosSin
from torch_kvq.cache.x_source import Latent, Projection, rebuild

_FUSED = ("qkv_proj", "c_attn", "query_key_value", "Wqkv")
_NORMS = ("k_norm", "k_layernorm", "key_layernorm")

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative error of keys and values at which they are not the module's."""


class AttentionSource:
    """The projections of an attention module, looked up anew each time: weights may change.

    Args:
        name: of the module.
        module: the module, which is not kept alive.

    Raises:
        ValueError: the module has no projections of a kind that is known.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = f"{name} ({type(module).__name__})"
        self._module = weakref.ref(module)
        self.latent: Latent | None = None
        self._split: tuple[Any, ...] = ()
        self._embedding: tuple[Any, Any] | None = None
        self._norm = next((norm for norm in _NORMS if getattr(module, norm, None)), None)
        if self._norm is not None:
            _norm_weight(getattr(module, self._norm), self.name)
        for projection in _projections(module):
            if not isinstance(projection, (nn.Linear, Conv1D)):
                raise ValueError(
                    f"{self.name} has a projection of the type {type(projection).__name__}: its "
                    "weights are not known, a cache of layer inputs serves Linear and Conv1D"
                )
            weight = projection.weight
            if type(weight) not in (Tensor, nn.Parameter) or weight.dtype not in _TOLERANCE:
                raise ValueError(
                    f"{self.name} has a {type(weight).__name__} of {weight.dtype} as a weight: a "
                    "cache of layer inputs serves plain float32, float16 and bfloat16; use KVQCache"
                )

    @property
    def module(self) -> nn.Module:
        """The module.

        Raises:
            ValueError: its model is gone.
        """
        module = self._module()
        if module is None:
            raise ValueError(f"the model of {self.name} is gone, which the cache needs")
        return module

    def projection(self, kv_heads: int, dims: tuple[int, int]) -> Projection:
        """The weights.

        Args:
            kv_heads: heads of keys and values.
            dims: channels of a key and of a value.
        """
        module = self.module
        norm, eps = None, 0.0
        if self._norm is not None:
            norm, eps = _norm_weight(getattr(module, self._norm), self.name)
        own = _projections(module)
        key, value = kv_heads * dims[0], kv_heads * dims[1]
        rows = len(_weight(own[0]))
        weights: list[Tensor | None] = []
        for tensors in ([_weight(one) for one in own], [one.bias for one in own]):
            if len(own) == 2 or tensors[0] is None:
                weights += [*tensors, None][:2]
            elif hasattr(module, "query_key_value") and rows == 2 * key + value:
                # Here the three follow one another within each head.
                parts = tensors[0].unflatten(0, (kv_heads, 3, -1))
                weights += [parts[:, 1].flatten(0, 1), parts[:, 2].flatten(0, 1)]
            else:
                weights += tensors[0][rows - key - value :].split([key, value])
        key_weight, value_weight, key_bias, value_bias = (
            None if weight is None else weight.detach() for weight in weights
        )
        assert key_weight is not None and value_weight is not None
        return Projection(key_weight, value_weight, key_bias, value_bias, norm, eps)

    def keep_split(self, latent: Latent) -> None:
        """Take the weights as they are now, split by their singular values."""
        self.latent, self._split = latent, self._version()

    @property
    def is_split(self) -> bool:
        """Whether the weights are still those that were split."""
        return self.latent is not None and self._split == self._version()

    def _version(self) -> tuple[Any, ...]:
        weights = [one.weight for one in _projections(self.module)]
        return tuple(
            (x.dtype, x.device, x.data_ptr(), None if x.is_inference() else x._version)
            for x in weights
        )

    def __deepcopy__(self, memo: Any) -> AttentionSource:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def kv_heads(self, config: Any, dims: tuple[int, int]) -> int:
        """Heads of keys and values, from the rows of the weights.

        Args:
            config: of the layer, for the heads of its queries.
            dims: channels of a key and of a value.
        """
        own = _projections(self.module)
        rows = len(_weight(own[0]))
        if len(own) == 2:
            return rows // dims[0]
        return (rows - config.num_attention_heads * dims[0]) // sum(dims)

    def follow(self, embedding: nn.Module, norm: nn.Module) -> None:
        """Name the modules whose results are the input."""
        self._embedding = weakref.ref(embedding), weakref.ref(norm)

    def embedded(self, ids: Tensor) -> Tensor | None:
        """What embedding and norm make of tokens, None where that is not the input.

        Args:
            ids: int ``[batch, tokens]``.
        """
        embedding, norm = (None, None) if self._embedding is None else self._embedding
        if embedding is None or norm is None or embedding() is None or norm() is None:
            return None
        # Not a call: hooks are for what the model does.
        made: Tensor = norm().forward(embedding().forward(ids)).detach()
        return made

    def settle(self, x: Tensor, key: Tensor, value: Tensor, cos_sin: CosSin | None) -> None:
        """Compare with the module's own keys and values.

        Args:
            x: ``[batch, tokens, channels]``.
            key: ``[batch, kv_heads, tokens, key_dim]``, after norm and rotary embedding.
            value: ``[batch, kv_heads, tokens, value_dim]``.
            cos_sin: cosines and sines of these tokens.

        Raises:
            ValueError: they are others.
        """
        own = self.projection(key.shape[1], (key.shape[3], value.shape[3]))
        parts = [x]
        if self.latent is not None:
            parts, own = self.latent.of(x), self.latent.rest(own)
        error = float("inf")
        if own.fits(key, value):
            rebuilt = rebuild(parts, own, key.shape[1], cos_sin)
            error = max(map(_distance, rebuilt, (key, value)))
        if error > _TOLERANCE[x.dtype]:
            raise ValueError(
                f"{self.name} computes its keys and values in a way that is not known: those "
                f"rebuilt from its input differ by {error:.2g} of their norm; use KVQCache"
            )


def _distance(got: Tensor, want: Tensor) -> float:
    wanted = want.float()
    return float((got.float() - wanted).norm() / wanted.norm().clamp(min=1e-12))


def _projections(module: nn.Module) -> list[Any]:
    """``k_proj`` and ``v_proj``, or the one that they are fused into."""
    if hasattr(module, "k_proj") and hasattr(module, "v_proj"):
        return [module.k_proj, module.v_proj]
    return [getattr(module, name) for name in _FUSED if hasattr(module, name)][:1]


def _weight(projection: Any) -> Tensor:
    weight: Tensor = projection.weight
    return weight.T if isinstance(projection, Conv1D) else weight


def _norm_weight(norm: Any, name: str) -> tuple[Tensor, float]:
    """The weight of an RMS norm as a factor: some modules add one to what they hold.

    Raises:
        ValueError: it is no RMS norm.
    """
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = getattr(norm, "weight", None)
    if eps is None or weight is None or weight.dim() != 1:
        raise ValueError(f"{name} has a norm of its keys that is not known: {norm}")
    one = torch.ones_like(weight)
    factor = norm(one).float() * (1 + eps) ** 0.5
    return factor.detach(), float(eps)


def find_attention(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Names and attention modules of a model by layer, without those that attend to others."""
    return {
        module.layer_idx: (name, module)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "layer_idx", None), int)
        and _projections(module)
        and not getattr(module, "is_cross_attention", False)
    }
