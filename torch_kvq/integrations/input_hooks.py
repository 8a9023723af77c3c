"""Hooks of a model that catch the inputs of its attention modules."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torch_kvq.cache.opaque import outside_graphs
from torch_kvq.cache.x_shared import CosSin
from torch_kvq.cache.x_source import Staged
from torch_kvq.integrations.projections import AttentionSource, find_attention

_POSITIONS = "_kvq_positions"


class Attachment:
    """Hooks in a model that stage the inputs of its attention modules; removed with the object.

    The caches of a model share one, see `of`.

    Args:
        model: the model, which is not kept alive.
        find: the cache of layer inputs that an argument of a module is, or None.

    Attributes:
        model: a reference to the model.
        sources: attention modules by layer.
        refused: errors of those that cannot be served.
    """

    _known: weakref.WeakValueDictionary[int, Attachment] = weakref.WeakValueDictionary()

    @classmethod
    def of(cls, model: nn.Module, find: Callable[[Any], Any]) -> Attachment:
        """The hooks of a model, made unless another cache has them."""
        known = cls._known.get(id(model))
        if known is None or known.model() is not model:
            cls._known[id(model)] = known = cls(model, find)
        return known

    def __init__(self, model: nn.Module, find: Callable[[Any], Any]) -> None:
        self.model = weakref.ref(model)
        self.sources: dict[int, AttentionSource] = {}
        self.refused: dict[int, ValueError] = {}
        handles: list[Any] = []
        weakref.finalize(self, _remove, handles)
        recent: dict[str, Tensor] = {}
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        if embedding is not None:
            handles.append(embedding.register_forward_pre_hook(_Hook(_note_ids, recent)))
        modules = dict(model.named_modules())
        for module in modules.values():
            if type(module).__name__.endswith("RotaryEmbedding"):
                hook = _Hook(_note_positions, inspect.signature(module.forward))
                handles.append(module.register_forward_hook(hook, with_kwargs=True))
        for index, (name, module) in find_attention(model).items():
            try:
                self.sources[index] = source = AttentionSource(name, module)
            except ValueError as error:
                self.refused[index] = error
                continue
            norm = getattr(modules[name.rpartition(".")[0]], "input_layernorm", None)
            if index == 0 and embedding is not None and norm is not None:
                source.follow(embedding, norm)
            hook = _Hook(_stage, find, recent)
            handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def __deepcopy__(self, memo: Any) -> Attachment:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class _Hook:
    """A hook that a copy of its model does not have: nobody would remove it there.

    Args:
        function: what it does.
        *given: its first arguments.
    """

    def __init__(self, function: Callable[..., None], *given: Any) -> None:
        self._call = functools.partial(function, *given)

    @outside_graphs("layer inputs are caught outside of compiled graphs")
    def __call__(self, *args: Any) -> None:
        """Do it."""
        self._call(*args)

    def __deepcopy__(self, memo: Any) -> Any:
        return _do_nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any) -> None:
    pass


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _note_ids(recent: dict[str, Tensor], module: nn.Module, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], Tensor):
        recent["ids"] = args[0]


def _stage(
    find: Callable[[Any], Any],
    recent: dict[str, Tensor],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    given = (*kwargs.values(), *args)
    cache = next((found for value in given if (found := find(value)) is not None), None)
    if cache is None or not cache.stores_input(module.layer_idx):
        return
    x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    cos_sin = kwargs.get("position_embeddings")
    if cos_sin is None:
        cos_sin = next((arg for arg in args[1:] if isinstance(arg, tuple) and len(arg) == 2), None)
    rotary = positions = None
    if cos_sin is not None:
        known = getattr(cos_sin[0], _POSITIONS, None)
        if known is None or known[1].dim() != 2:
            raise ValueError(
                f"{type(module).__name__} of layer {module.layer_idx} has a rotary embedding whose "
                "positions are not known: a cache of layer inputs serves those that a model's "
                "RotaryEmbedding makes of one position for each token"
            )
        rotary, positions = known
        rotary.check()
    ids = recent.get("ids") if module.layer_idx == 0 else None
    cache.stage(module.layer_idx, Staged(x, cos_sin, rotary, positions, ids))


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
        self._module = weakref.ref(module)
        self._key = (id(module), others)
        self._others = dict(others)

    def check(self) -> None:
        """Raise ValueError when the embedding of a position is not the same at all times."""
        module = self._module()
        kinds = getattr(module, "rope_type", "default")
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in ("dynamic", "longrope"):
                raise ValueError(
                    f"{type(module).__name__} is of the type {kind!r}, whose frequencies change "
                    "with the length: keys of a cache of layer inputs would change with them"
                )

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
