"""Tiny random models of the architectures that the integration is tested on."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

VOCABULARY = 97

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 48}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 40}),
    "gpt2": ("GPT2", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 40, "attn_logit_softcapping": 5.0}),
    "gpt-oss": (
        "GptOss",
        {"head_dim": 32, "sliding_window": 40, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "falcon": ("Falcon", {"new_decoder_architecture": False, "multi_query": True}),
}

_CAUSAL_LM = {"GPT2": "GPT2LMHeadModel"}

ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "mistral-window", "gpt2")


def tiny_config(name: str, **changes: Any) -> Any:
    """A configuration with head dims of 32 or more."""
    family, options = _MODELS[name]
    return getattr(transformers, f"{family}Config")(**{**_COMMON, **options, **changes})


@functools.lru_cache
def tiny_model(name: str, attention: str = "sdpa", **changes: Any) -> Any:
    """A model with random weights; the same one for the same arguments."""
    family, _ = _MODELS[name]
    kind = getattr(transformers, _CAUSAL_LM.get(family, f"{family}ForCausalLM"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind._from_config(tiny_config(name, **changes), attn_implementation=attention)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


def token_ids(batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    """Random tokens, ``int64[batch, tokens]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, tokens), generator=generator)


def left_padded(padding: tuple[int, ...], tokens: int) -> dict[str, torch.Tensor]:
    """Random tokens of a batch whose rows begin with so much padding, and their mask."""
    ids = token_ids(len(padding), tokens, seed=1)
    mask = torch.arange(tokens) >= torch.tensor(padding).unsqueeze(1)
    return {"input_ids": ids * mask, "attention_mask": mask.long()}
