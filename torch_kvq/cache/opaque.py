"""A layer that grows, as compiled graphs see it: calls that they do not look into.

Its tensors are replaced when they grow, and who owns which page is kept in lists. A graph that saw
either would be compiled anew with every page, until PyTorch gives up.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch_kvq.cache.packed import PackedLayer

_P = ParamSpec("_P")
_R = TypeVar("_R")

_layers: weakref.WeakValueDictionary[int, PackedLayer] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_library = torch.library.Library("kvq", "FRAGMENT")


def outside_graphs(reason: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a graph that is compiled break at a function, or be refused with the reason."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        disabled: Callable[_P, _R] = torch.compiler.disable(function, reason=reason)
        return disabled

    return decorate


@outside_graphs(
    "a layer that grows is made outside of compiled graphs: give the cache config=model.config, "
    "call the model once without compiling, or allocate at once with max_cache_len"
)
def enroll(layer: PackedLayer) -> Tensor:
    """A tensor by which compiled graphs name the layer; they would be specialised on a number."""
    number = next(_numbers)
    _layers[number] = layer
    with torch.inference_mode(False):
        return torch.tensor(number, device="cpu")


def update(layer: PackedLayer, key: Tensor, value: Tensor) -> None:
    """`PackedLayer.update` without its handles."""
    torch.ops.kvq._layer_update.default(_ticket(layer), key.detach(), value.detach())


def flush_attended(
    layer: PackedLayer, query: Tensor, attn_mask: Tensor | None, options: dict[str, Any]
) -> None:
    """`PackedLayer.flush_attended`."""
    torch.ops.kvq._layer_flush.default(
        _ticket(layer), query.detach(), attn_mask, **_detached(options)
    )


def attend(
    layer: PackedLayer,
    query: Tensor,
    attn_mask: Tensor | None,
    value_dim: int,
    options: dict[str, Any],
) -> Tensor:
    """`PackedLayer.attend`, whose result has ``value_dim`` channels."""
    out: Tensor = torch.ops.kvq._layer_attend.default(
        _ticket(layer), query.detach(), attn_mask, value_dim, **_detached(options)
    )
    return out


def _detached(options: dict[str, Any]) -> dict[str, Any]:
    if options.get("sinks") is None:
        return options
    return {**options, "sinks": options["sinks"].detach()}


def _ticket(layer: PackedLayer) -> Tensor:
    assert layer.ticket is not None, "a static layer has none"
    return layer.ticket


_OPTIONS = (
    "float? scale=None, bool is_causal=False, SymInt? sliding_window=None, float? softcap=None, "
    'Tensor? sinks=None, str precision="exact"'
)


# The ticket counts as written to, so that calls keep their order and none is left out.
def _define(schema: str, implementation: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _library.define(schema)
    name = schema[: schema.index("(")]
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kvq::{name}", fake, lib=_library)


def _update(ticket: Tensor, key: Tensor, value: Tensor) -> None:
    layer = _layers[int(ticket)]
    if layer.state is None or not layer.state.placed:
        # It keeps them back, and the graph may use their memory again before they are stored.
        key, value = key.clone(), value.clone()
    layer.update(key, value)


def _flush(ticket: Tensor, query: Tensor, attn_mask: Tensor | None, **options: Any) -> None:
    _layers[int(ticket)].flush_attended(query, attn_mask, options)


def _attend(
    ticket: Tensor, query: Tensor, attn_mask: Tensor | None, value_dim: int, **options: Any
) -> Tensor:
    return _layers[int(ticket)].attend(query, attn_mask, **options).contiguous()


def _attend_fake(
    ticket: Tensor, query: Tensor, attn_mask: Tensor | None, value_dim: int, **options: Any
) -> Tensor:
    return query.new_empty((*query.shape[:3], value_dim))


_define(
    "_layer_update(Tensor(a!) ticket, Tensor key, Tensor value) -> ()",
    _update,
    lambda ticket, key, value: None,
)
_define(
    f"_layer_flush(Tensor(a!) ticket, Tensor query, Tensor? attn_mask, *, {_OPTIONS}) -> ()",
    _flush,
    lambda ticket, query, attn_mask, **options: None,
)
_define(
    "_layer_attend(Tensor(a!) ticket, Tensor query, Tensor? attn_mask, SymInt value_dim, *, "
    f"{_OPTIONS}) -> Tensor",
    _attend,
    _attend_fake,
)
