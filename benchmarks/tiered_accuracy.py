"""What two tiers do to a real model's attention and predictions, and the bytes that they take."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_kvq import KVQCache, TieredCache, TieredLayer, formats
from torch_kvq.cache.tier_map import FAR, NEAR, PROMOTED

from .model import continuation
from .report import Check, Column, Table
from .retrieval import PROMOTION, cache_name
from .trial import Divergence, Trial

LEAST_COSINE = 0.995
LEAST_RATIO = {("fp8-int4", 128): 1.95, ("fp8-int4", 64): 1.9, ("tile4", 128): 2.5}
"""Bytes of float16 against those of the tiers, headroom and indices included."""

OBSERVED = 32
TOKENS = 4096
KV_HEADS = 2
"""Tokens and heads whose bytes are counted; those of a token and head hardly depend on them."""

COLUMNS = [
    Column("name", "cache"),
    Column("worst", "cosine, worst layer", ".5f"),
    Column("cosine", "mean cosine", ".5f"),
    Column("mean", "mean KL", ".5f"),
    Column("agreement", "same top token", ".1%"),
    Column("rate", "promotions, of steps x layers x KV heads", ".1%"),
    Column("bytes_64", "bytes per token and KV head, dim 64", ".0f"),
    Column("ratio_64", "float16 is x times as large", ".2f"),
    Column("bytes_128", "the same, dim 128", ".0f"),
    Column("ratio_128", "x", ".2f"),
]
MAP_COLUMNS = [
    Column("step", "tokens decoded", "d"),
    Column("head", "KV head", "d"),
    Column("far", "far", "d"),
    Column("near", "near", "d"),
    Column("returned", "came back", "d"),
]
MAPPED_LAYER = 20
"""The layer of SmolLM2 to which most tokens come back."""

Recording = list[tuple[Tensor, Tensor, Tensor]]
"""Queries of the last tokens, keys and values of every layer."""


def recorded(model: Any, ids: Tensor, past: int) -> Recording:
    """What the layers of a model attend with while it reads ``ids``, int64 ``[1, tokens]``.

    Returns:
        Queries from `OBSERVED` tokens before ``past`` on, and keys and values of all tokens.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    layers: Recording = []

    def record(
        module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any
    ) -> Any:
        layers.append((query[:, :, past - OBSERVED :], key, value))
        return sdpa_attention_forward(module, query, key, value, *args, **kw)

    with attention(model, record):
        model.model(ids, use_cache=False)
    return layers


@contextlib.contextmanager
def attention(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Let a model attend by a function meanwhile."""
    from transformers.modeling_utils import AttentionInterface

    name, before = "recording", model.config._attn_implementation
    AttentionInterface.register(name, function)
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before
        del AttentionInterface._global_mapping[name]


def cosine(far: str, query: Tensor, key: Tensor, value: Tensor) -> float:
    """Mean cosine of a layer's outputs, decoded one by one after a prompt, with the exact ones.

    Args:
        far: format of the far tier.
        query: ``[1, heads, OBSERVED + new, dim]``, the last of the prompt and the new ones.
        key: ``[1, kv_heads, tokens, dim]``, the new ones included.
        value: the same for values.
    """
    layer, new = TieredLayer(far=far), query.shape[2] - OBSERVED
    past = key.shape[2] - new
    layer.update(key[:, :, :past], value[:, :, :past])
    layer.attend(query[:, :, :OBSERVED], is_causal=True)
    outputs = []
    for step in range(new):
        part = slice(past + step, past + step + 1)
        layer.update(key[:, :, part], value[:, :, part])
        outputs.append(layer.attend(query[:, :, OBSERVED + step : OBSERVED + step + 1]))
    causal = torch.ones(new, past + new, dtype=torch.bool).tril(past)
    wanted = F.scaled_dot_product_attention(
        query[:, :, OBSERVED:], key, value, causal, enable_gqa=True
    )
    return float(F.cosine_similarity(torch.cat(outputs, 2), wanted, dim=-1).mean())


def bytes_per_token(far: str, dim: int) -> tuple[float, float]:
    """Bytes of a token and KV head in a 16-bit model, and how many times float16's are as many."""
    cache = TieredCache(far=far, promote=False)
    key, value = torch.randn(2, 1, KV_HEADS, TOKENS, dim, dtype=torch.bfloat16)
    cache.update(key, value, 0)
    query = torch.randn(1, 2 * KV_HEADS, OBSERVED, dim, dtype=torch.bfloat16)
    cache.layers[0].attend(query, is_causal=True)
    report = cache.memory_report()
    return report.total_bytes / (TOKENS * KV_HEADS), report.ratio


@dataclass(frozen=True)
class Reader:
    """A model and the text that it reads and goes on with.

    Attributes:
        trial: the exact predictions.
        prompt: int64 ``[1, tokens]``.
    """

    trial: Trial
    prompt: Tensor

    @classmethod
    def of(cls, model: Any, ids: Tensor, past: int) -> Reader:
        """Read ``past`` tokens exactly; the rest is the continuation."""
        return cls(Trial.read(model, ids, past), ids[:, :past])

    def divergence(self, cache: Any) -> dict[str, float]:
        """What a cache that has read the prompt does to the continuation, token by token."""
        self.trial.model(self.prompt, past_key_values=cache, logits_to_keep=1)
        trial = self.trial
        logits = continuation(trial.model, cache, trial.ids)
        found = Divergence.of(logits, trial.exact, trial.ids[0, 1:])
        return {"mean": found.mean, "agreement": found.agreement}

    def tiered(self, far: str, **options: Any) -> dict[str, float]:
        """The same for tiers, with the rate of promotions."""
        cache = TieredCache(far=far, **options)
        found = self.divergence(cache)
        heads = sum(layer.state.kv_heads for layer in cache.tiered_layers if layer.state)
        rate = cache.promoted / (heads * self.trial.ids.shape[1])
        cache.close()
        return {**found, "rate": rate}


def table(model: Any, ids: Tensor, past: int) -> Table:
    """Both formats, without promotion and with it, and packed tiles alone.

    Args:
        model: a causal language model.
        ids: int64 ``[1, tokens]``.
        past: tokens that are the prompt; the others are decoded.
    """
    recording, reader = recorded(model, ids, past), Reader.of(model, ids, past)
    rows = []
    for far in formats.FAR_FORMATS:
        cosines = [cosine(far, *layer) for layer in recording]
        sizes: dict[str, float] = {"worst": min(cosines), "cosine": sum(cosines) / len(cosines)}
        for dim in (64, 128):
            sizes[f"bytes_{dim}"], sizes[f"ratio_{dim}"] = bytes_per_token(far, dim)
        for options in PROMOTION:
            found = reader.tiered(far, **options)
            shown = {} if options["promote"] else sizes
            rows.append({"name": cache_name(far, options), **shown, **found})
    rows.append({"name": "KVQCache(bits=4)", **reader.divergence(KVQCache(4))})
    return Table("accuracy", "Accuracy and bytes, SmolLM2", COLUMNS, rows)


def checks(accuracy: Table) -> list[Check]:
    """Cosines and bytes."""
    result = []
    for far in formats.FAR_FORMATS:
        row = next(row for row in accuracy.rows if f"{far!r}" in row["name"])
        result.append(Check(f"{far}, 1 - cosine, worst layer", 1 - row["worst"], 1 - LEAST_COSINE))
        for (name, dim), ratio in LEAST_RATIO.items():
            if name == far:
                share = 1 / row[f"ratio_{dim}"]
                result.append(Check(f"{far}, bytes of float16's, dim {dim}", share, 1 / ratio))
    return result


def tier_map(model: Any, ids: Tensor, past: int) -> Table:
    """Tiers of a layer's tokens after the prompt, and in the middle and at the end of the rest."""
    cache = TieredCache(promote="sync")
    model(ids[:, :past], past_key_values=cache, logits_to_keep=1)
    rows = map_rows(cache, 0)
    step = 0
    for part in ids[:, past:].chunk(2, 1):
        continuation(model, cache, part)
        step += part.shape[1]
        rows += map_rows(cache, step)
    cache.close()
    return Table("map", f"Tiers of layer {MAPPED_LAYER} of SmolLM2 over time", MAP_COLUMNS, rows)


def map_rows(cache: TieredCache, step: int) -> list[dict[str, Any]]:
    """The tiers of every token of a head as digits, and how many tokens each tier has."""
    names = {"far": FAR, "near": NEAR, "returned": PROMOTED}
    return [
        {
            "step": step,
            "head": head,
            **{name: tokens.count(tier) for name, tier in names.items()},
            "tiers": "".join(map(str, tokens)),
        }
        for head, tokens in enumerate(cache.tier_map(MAPPED_LAYER).tiers.tolist())
    ]
