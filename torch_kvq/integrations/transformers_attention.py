"""Transformers' attention functions, taught to read packed caches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface
from transformers.utils.output_capturing import _active_collector

from torch_kvq.cache.exact import attend_exact
from torch_kvq.cache.handle import KVQHandle

NAME = "kvq"
"""Name of an attention implementation that packs without a kernel of its own for prompts."""

Attention = Callable[..., tuple[Tensor, Any]]

_aware: dict[Attention, Attention] = {}


def install() -> None:
    """Teach all attention functions to read packed caches; repeated calls find new ones.

    The functions registered by name are replaced, and so is what ``get_interface`` returns: a
    model's own ``eager`` function is registered nowhere.
    """
    for name, function in list(AttentionInterface._global_mapping.items()):
        if not name.startswith("paged|"):
            AttentionInterface.register(name, aware(function))
    AttentionInterface.register(NAME, kvq_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if not hasattr(AttentionInterface.get_interface, "_kvq_original"):
        AttentionInterface.get_interface = _aware_lookup(AttentionInterface.get_interface)


def aware(function: Attention) -> Attention:
    """An attention function that reads packed keys and values and else is ``function``."""
    if hasattr(function, "_kvq_original"):
        return function
    if function not in _aware:
        _aware[function] = _make_aware(function)
    return _aware[function]


def kvq_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attention of the name ``"kvq"``.

    Packed where there is a packed cache, else ``"sdpa"``, but with the soft caps and the sinks that
    ``"sdpa"`` has not, unless gradients are needed.
    """
    if not _asks_for_more(kwargs):
        options = _options(module, query, attention_mask, kwargs)
        if type(key) is KVQHandle and key.matches(value):
            return _attend(key.layer.attend, query, key.length, attention_mask, options), None
        needs_own = options["softcap"] is not None or options["sinks"] is not None
        if needs_own and isinstance(key, Tensor) and not query.requires_grad:
            attend = functools.partial(attend_exact, key=key, value=value)
            return _attend(attend, query, key.shape[2], attention_mask, options), None
    return aware(sdpa_attention_forward)(module, query, key, value, attention_mask, **kwargs)


kvq_attention_forward._kvq_original = sdpa_attention_forward  # type: ignore[attr-defined]


def _aware_lookup(get_interface: Callable[..., Attention]) -> Callable[..., Attention]:
    @functools.wraps(get_interface)
    def lookup(self: Any, *args: Any, **kwargs: Any) -> Attention:
        return aware(get_interface(self, *args, **kwargs))

    lookup._kvq_original = get_interface  # type: ignore[attr-defined]
    return lookup


def _make_aware(function: Attention) -> Attention:
    @functools.wraps(function)
    def attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Any,
        value: Any,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        if type(key) is not KVQHandle:
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        if key.is_first and key.matches(value):
            return _first(function, module, query, key, value, attention_mask, *args, **kwargs)
        if args or _asks_for_more(kwargs) or not key.matches(value):
            dense = value.dense() if type(value) is KVQHandle else value
            return function(module, query, key.dense(), dense, attention_mask, *args, **kwargs)
        options = _options(module, query, attention_mask, kwargs)
        if function is sdpa_attention_forward:
            # It ignores them, so that the model's own prompt goes without.
            options["softcap"] = options["sinks"] = None
        return _attend(key.layer.attend, query, key.length, attention_mask, options), None

    attention._kvq_original = function  # type: ignore[attr-defined]
    return attention


def _asks_for_more(kwargs: dict[str, Any]) -> bool:
    """Whether a call asks for what packed attention does not give."""
    return bool(
        kwargs.get("position_bias") is not None
        or kwargs.get("output_attentions")
        or kwargs.get("dropout")
        or _records_weights()
    )


def _records_weights() -> bool:
    """Whether attention weights are collected without an argument that says so."""
    if torch.compiler.is_compiling():
        return False
    recorded = _active_collector.get()
    return recorded is not None and "attentions" in recorded


def _first(
    function: Attention,
    module: torch.nn.Module,
    query: Tensor,
    key: KVQHandle,
    value: KVQHandle,
    attention_mask: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """The prompt: the model's own kernel on exact keys and values, which are packed afterwards."""
    tokens = key.new.shape[2]
    if attention_mask is None or isinstance(attention_mask, Tensor):
        mask = None if attention_mask is None else attention_mask[..., :tokens]
        if kwargs.get("position_bias") is not None:
            kwargs["position_bias"] = kwargs["position_bias"][..., :tokens]
        result = function(module, query, key.new, value.new, mask, *args, **kwargs)
    else:
        result = function(
            module, query, key.dense(), value.dense(), attention_mask, *args, **kwargs
        )
    mask = _whole_mask(attention_mask, query.shape[2], key.length)
    key.layer.flush_attended(query, mask, _options(module, query, attention_mask, kwargs))
    return result


def _options(
    module: torch.nn.Module, query: Tensor, attention_mask: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """What the arguments of an attention function mean for packed attention."""
    # Only a mask of four dimensions has causality and sliding window in it.
    is_open = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    is_open = is_open or attention_mask is None
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return {
        "scale": kwargs.get("scaling"),
        "is_causal": is_open and is_causal and query.shape[2] > 1,
        "sliding_window": kwargs.get("sliding_window") if is_open else None,
        "softcap": kwargs.get("softcap"),
        "sinks": kwargs.get("s_aux"),
    }


def _attend(
    attend: Callable[..., Tensor],
    query: Tensor,
    columns: int,
    attention_mask: Any,
    options: dict[str, Any],
) -> Tensor:
    """Packed attention; ``[batch, tokens, heads, value_dim]`` as Transformers has it."""
    mask = _whole_mask(attention_mask, query.shape[2], columns)
    return attend(query=query, attn_mask=mask, **options).transpose(1, 2).contiguous()


def _whole_mask(attention_mask: Any, queries: int, columns: int) -> Tensor | None:
    """A mask in any of Transformers' forms as four dimensions."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):  # BlockMask of flex attention
        from torch.nn.attention.flex_attention import create_mask

        batch, heads = attention_mask.shape[:2]
        device = attention_mask.kv_num_blocks.device
        return create_mask(attention_mask.mask_mod, batch, heads, queries, columns, device=device)
    if attention_mask.ndim == 2:  # flash attention: the padding alone
        missing = max(columns - attention_mask.shape[1], 0)
        return F.pad(attention_mask.bool(), (0, missing))[:, None, None]
    return attention_mask
