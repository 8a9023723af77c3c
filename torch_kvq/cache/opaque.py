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
    from torch_kvq.cache.layer import KVQLayer

_P = ParamSpec("_P")
_R = TypeVar("_R")

_layers: weakref.WeakValueDictionary[int, KVQLayer] = weakref.WeakValueDictionary()
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
def enroll(layer: KVQLayer) -> Tensor:
    """A tensor by which compiled graphs name the layer; they would be specialised on a number."""
    number = next(_numbers)
    _layers[number] = layer
    with torch.inference_mode(False):
        return torch.tensor(number, device="cpu")


def update(layer: KVQLayer, key: Tensor, value: Tensor) -> None:
    """`KVQLayer.update` without its handles."""
    torch.ops.kvq._layer_update.default(_ticket(layer), key.detach(), value.detach())


def flush_masked(layer: KVQLayer, attn_mask: Tensor | None, queries: int) -> None:
    """`KVQLayer.flush_masked`."""
    torch.ops.kvq._layer_flush.default(_ticket(layer), attn_mask, queries)


def attend(
    layer: KVQLayer,
    query: Tensor,
    attn_mask: Tensor | None,
    value_dim: int,
    options: dict[str, Any],
) -> Tensor:
    """`KVQLayer.attend`, whose result has ``value_dim`` channels."""
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"].detach()
    out: Tensor = torch.ops.kvq._layer_attend.default(
        _ticket(layer), query.detach(), attn_mask, value_dim, **options
    )
    return out


def _ticket(layer: KVQLayer) -> Tensor:
    assert layer.ticket is not None, "a static layer has none"
    return layer.ticket


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


def _flush(ticket: Tensor, attn_mask: Tensor | None, queries: int) -> None:
    _layers[int(ticket)].flush_masked(attn_mask, queries)


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
    "_layer_flush(Tensor(a!) ticket, Tensor? attn_mask, SymInt queries) -> ()",
    _flush,
    lambda ticket, attn_mask, queries: None,
)
_define(
    "_layer_attend(Tensor(a!) ticket, Tensor query, Tensor? attn_mask, SymInt value_dim, *, "
    "float? scale=None, bool is_causal=False, SymInt? sliding_window=None, float? softcap=None, "
    'Tensor? sinks=None, str precision="exact") -> Tensor',
    _attend,
    _attend_fake,
)
