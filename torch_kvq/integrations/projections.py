"""Attention modules of a model: their projections, and hooks that catch their inputs."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from torch_kvq.cache.x_shared import CosSin
from torch_kvq.cache.x_source import Latent, Projection, Staged
from torch_kvq.cache.x_standin import remat

_FUSED = ("qkv_proj", "c_attn", "query_key_value", "Wqkv")
_NORMS = ("k_norm", "k_layernorm", "key_layernorm")
_POSITIONS = "_kvq_positions"

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
        self._is_interleaved = False
        self._latent: Latent | None = None
        self._norm = next((norm for norm in _NORMS if getattr(module, norm, None)), None)
        if self._norm is not None:
            _norm_weight(getattr(module, self._norm), self.name)
        for projection in _projections(module):
            if not isinstance(projection, (nn.Linear, Conv1D)):
                raise ValueError(
                    f"{self.name} has a projection of the type {type(projection).__name__}: its "
                    "weights are not known, a cache of layer inputs serves Linear and Conv1D"
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

    def projection(self, key: Tensor, value: Tensor) -> Projection:
        """The weights for keys and values ``[batch, kv_heads, tokens, dim]`` of such shapes."""
        module, (heads, dims) = self.module, (key.shape[1], (key.shape[3], value.shape[3]))
        norm, eps = None, 0.0
        if self._norm is not None:
            norm, eps = _norm_weight(getattr(module, self._norm), self.name)
        weights, biases = [], []
        for projection, rows in zip(_projections(module), self._rows(heads, dims), strict=False):
            weight, bias = _weight(projection), projection.bias
            bias = None if bias is None else bias.detach()
            weights += [_take(weight, part) for part in rows]
            biases += [None if bias is None else _take(bias, part) for part in rows]
        if self._latent is not None:
            weights = [self._latent.key_rest, self._latent.value_rest]
        return Projection(weights[0], weights[1], biases[0], biases[1], norm, eps)

    def __deepcopy__(self, memo: Any) -> AttentionSource:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def _rows(self, heads: int, dims: tuple[int, int]) -> list[list[Any]]:
        """Which outputs of each projection are keys and values."""
        whole = slice(None)
        if len(_projections(self.module)) == 2:
            return [[whole], [whole]]
        key, value = heads * dims[0], heads * dims[1]
        if not self._is_interleaved:
            return [[slice(-key - value, -value), slice(-value, None)]]
        return [[(heads, 1), (heads, 2)]]

    def settle(self, x: Tensor, key: Tensor, value: Tensor, cos_sin: CosSin | None) -> None:
        """Compare with the module's own keys and values, and find out how fused ones are laid out.

        Args:
            x: ``[batch, tokens, channels]``.
            key: ``[batch, kv_heads, tokens, key_dim]``, after norm and rotary embedding.
            value: ``[batch, kv_heads, tokens, value_dim]``.
            cos_sin: cosines and sines of these tokens.

        Raises:
            ValueError: they are others.
        """
        error = self._error(x, key, value, cos_sin)
        if error > _TOLERANCE[x.dtype] and hasattr(self.module, "query_key_value"):
            self._is_interleaved = not self._is_interleaved
            error = self._error(x, key, value, cos_sin)
        if error > _TOLERANCE[x.dtype]:
            raise ValueError(
                f"{self.name} computes its keys and values in a way that is not known: those "
                f"rebuilt from its input differ by {error:.2g} of their norm; use KVQCache"
            )

    def _error(self, x: Tensor, key: Tensor, value: Tensor, cos_sin: CosSin | None) -> float:
        latent, self._latent = self._latent, None
        try:
            own = self.projection(key, value)
            rebuilt = remat(
                x,
                x,
                key.shape[1],
                own.key_weight,
                own.value_weight,
                own.key_bias,
                own.value_bias,
                own.key_norm,
                own.norm_eps,
                *(cos_sin or (None, None)),
            )
        except RuntimeError:  # shapes that do not fit
            return float("inf")
        finally:
            self._latent = latent
        errors = [
            (got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-12)
            for got, want in zip(rebuilt, (key, value), strict=True)
        ]
        return float(max(errors))

    def latent(self) -> Latent:
        """The weights split by their singular values, from the user's cache of them if there."""
        if self._latent is None:
            raise ValueError(f"{self.name} was not split, which takes split()")
        return self._latent

    def split(self, config: Any, progress: Callable[[str], None] | None = None) -> None:
        """Split the weights, or load them split."""
        raise NotImplementedError


def _projections(module: nn.Module) -> list[Any]:
    """``k_proj`` and ``v_proj``, or the one that they are fused into."""
    if hasattr(module, "k_proj") and hasattr(module, "v_proj"):
        return [module.k_proj, module.v_proj]
    return [getattr(module, name) for name in _FUSED if hasattr(module, name)][:1]


def _weight(projection: Any) -> Tensor:
    weight: Tensor = projection.weight.detach()
    return weight.T if isinstance(projection, Conv1D) else weight


def _take(tensor: Tensor, rows: Any) -> Tensor:
    """Some outputs; a pair of heads and place picks one part of every head."""
    if isinstance(rows, slice):
        return tensor[rows]
    heads, place = rows
    parts = tensor.unflatten(0, (heads, 3, -1))
    return parts[:, place].flatten(0, 1)


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


class Attachment:
    """Hooks in a model that stage the inputs of its attention modules; removed with the object.

    Args:
        model: the model, which is not kept alive.
        sources: attention modules by layer.
        find: the cache of layer inputs among the arguments of a module, if there is one.
    """

    def __init__(self, model: nn.Module, find: Callable[[Any], Any]) -> None:
        self.model = weakref.ref(model)
        self.sources: dict[int, AttentionSource] = {}
        handles = []
        for name, module in model.named_modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                hook = functools.partial(_note_positions, inspect.signature(module.forward))
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
            index = getattr(module, "layer_idx", None)
            if not isinstance(index, int) or not _projections(module):
                continue
            if getattr(module, "is_cross_attention", False):
                continue
            self.sources[index] = AttentionSource(name, module)
            hook = functools.partial(_stage, find)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        weakref.finalize(self, _remove, handles)

    def __deepcopy__(self, memo: Any) -> Attachment:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _stage(
    find: Callable[[Any], Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = (*kwargs.values(), *args)
    cache = next((found for value in given if (found := find(value)) is not None), None)
    if cache is None:
        return
    x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    cos_sin = kwargs.get("position_embeddings")
    if cos_sin is None:
        cos_sin = next((arg for arg in args[1:] if isinstance(arg, tuple) and len(arg) == 2), None)
    rotary = positions = None
    if cos_sin is not None:
        rotary, positions = getattr(cos_sin[0], _POSITIONS, (None, None))
        if positions is None or positions.dim() != 2:
            raise ValueError(
                f"{type(module).__name__} of layer {module.layer_idx} has a rotary embedding whose "
                "positions are not known: a cache of layer inputs serves those that a model's "
                "RotaryEmbedding makes of one position for each token"
            )
    cache.stage(module.layer_idx, Staged(x, cos_sin, rotary, positions))


def _note_positions(
    signature: inspect.Signature,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Let cosines know of which positions they are, and how to make more of them."""
    given = signature.bind(*args, **kwargs).arguments
    positions = given.get("position_ids")
    if isinstance(output, tuple) and isinstance(positions, Tensor):
        others = {name: given[name] for name in given if name not in ("x", "position_ids")}
        rotary = ModuleRotary(module, tuple(sorted(others.items())))
        setattr(output[0], _POSITIONS, (rotary, positions))


class ModuleRotary:
    """A rotary embedding of a model.

    Args:
        module: its module, which is not kept alive.
        others: arguments beside the positions, such as the type of the layer.
    """

    def __init__(self, module: nn.Module, others: tuple[tuple[str, Any], ...]) -> None:
        kinds = getattr(module, "rope_type", "default")
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in ("dynamic", "longrope"):
                raise ValueError(
                    f"{type(module).__name__} is of the type {kind!r}, whose frequencies change "
                    "with the length: keys of a cache of layer inputs would change with them"
                )
        self._module = weakref.ref(module)
        self._key = (id(module), others)
        self._others = dict(others)

    def __call__(self, positions: Tensor, like: Tensor) -> CosSin:
        """Cosines and sines ``[batch, tokens, rotary_dim]``."""
        module = self._module()
        if module is None:
            raise ValueError("the model of the rotary embedding is gone, which the cache needs")
        cos, sin = module.forward(like, position_ids=positions, **self._others)
        return cos, sin

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleRotary) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __deepcopy__(self, memo: Any) -> ModuleRotary:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()
