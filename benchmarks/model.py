"""The model, its caches and its predictions, for the benchmarks that need them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_kvq.demo import document, load_model

Tokens = Sequence[tuple[Tensor, Tensor]]
"""Keys and values of every layer, ``[1, kv_heads, tokens, dim]``."""

SLOW_PAIRS = 4
"""RoPE pairs, the slowest ones, that `biased_keys` shifts."""


def model_and_text(tokens: int) -> tuple[Any, Tensor]:
    """SmolLM2-135M-Instruct in float32, and ``int64[1, tokens]`` of English prose."""
    model, tokenizer = quiet_model()
    return model, document(tokenizer, tokens)


def quiet_model() -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct in float32 and its tokenizer, without what Transformers says."""
    import transformers

    # Newer releases call it cache, older ones know past_key_values alone.
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
    transformers.logging.disable_progress_bar()
    return load_model()


@contextlib.contextmanager
def biased_keys(model: Any, norm: float = 300.0) -> Iterator[None]:
    """Give the keys of the first and the last layer a large bias in their slowest RoPE pairs.

    Some models have such keys by training. The bias hardly changes what this model computes, since
    it adds nearly the same to every score of a query, but it makes keys hard to quantise.

    Args:
        model: a Llama without biases, which it gets back afterwards.
        norm: of the bias of a KV head.
    """
    layers = model.model.layers
    projections = [layers[0].self_attn.k_proj, layers[-1].self_attn.k_proj]
    dim = model.config.head_dim
    half = dim // 2
    channels = torch.arange(dim).view(2, half)[:, half - SLOW_PAIRS :].flatten()
    generator = torch.Generator().manual_seed(0)
    for projection in projections:
        direction = torch.randn(projection.out_features // dim, len(channels), generator=generator)
        bias = torch.zeros(len(direction), dim)
        bias[:, channels] = norm * direction / direction.norm(dim=1, keepdim=True)
        projection.bias = torch.nn.Parameter(bias.flatten(), requires_grad=False)
    try:
        yield
    finally:
        for projection in projections:
            projection.bias = None


def prefill(model: Any, ids: Tensor, chunk: int = 2048) -> tuple[Tokens, Tensor]:
    """Read a text.

    Args:
        model: a causal language model.
        ids: ``int64[1, tokens]``.
        chunk: tokens of a call.

    Returns:
        Keys and values of every layer, and ``float32[tokens - 1]``, the negative log-likelihood of
        each token but the first.
    """
    from transformers import DynamicCache

    cache, losses, last = DynamicCache(), [], None
    for part in ids.split(chunk, 1):
        logits = model(part, past_key_values=cache).logits[0]
        if last is not None:
            losses.append(loss(last, part[0, :1]))
        losses.append(loss(logits[:-1], part[0, 1:]))
        last = logits[-1:]
    return [(layer.keys, layer.values) for layer in cache.layers], torch.cat(losses)


def filled(cache: Any, tokens: Tokens) -> Any:
    """The cache with keys and values as after a prompt, whose attention is exact in all caches."""
    for index, (key, value) in enumerate(tokens):
        cache.update(key, value, index)
        if hasattr(cache.layers[index], "flush"):
            cache.layers[index].flush()
    return cache


def continuation(model: Any, cache: Any, ids: Tensor, step: int | Sequence[int] = 1) -> Tensor:
    """Logits of a given continuation.

    Args:
        model: a causal language model.
        cache: holds what precedes ``ids``; the continuation is appended.
        ids: ``int64[1, tokens]``.
        step: tokens of a call, or of each call: 1 is decoding.

    Returns:
        float32 ``[tokens, vocabulary]``.
    """
    parts = ids.split(step if isinstance(step, int) else list(step), 1)
    calls = [model(part, past_key_values=cache).logits[0] for part in parts]
    return torch.cat(calls).float()


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target: ``[tokens, vocabulary]`` and ``[tokens]``."""
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
