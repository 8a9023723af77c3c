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
    "tie_word_embeddings": False,
}

_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 48}),
    "qwen3-next": (
        "Qwen3Next",
        {
            "head_dim": 32,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 40}),
    "mistral-long-window": ("Mistral", {"sliding_window": 72}),
    "mixtral": ("Mixtral", {"num_local_experts": 2, "num_experts_per_tok": 2}),
    "phi3": ("Phi3", {}),
    "gemma2": ("Gemma2", {"head_dim": 32, "sliding_window": 40, "attn_logit_softcapping": 5.0}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "head_dim": 32,
            "sliding_window": 40,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gpt2": ("GPT2", {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "gpt-neox": ("GPTNeoX", {}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 128}),
    "falcon": ("Falcon", {"new_decoder_architecture": False, "multi_query": True}),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 4}),
    "gpt-oss": (
        "GptOss",
        {"head_dim": 32, "sliding_window": 40, "num_local_experts": 2, "num_experts_per_tok": 2},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "t5": (
        "T5",
        {
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "initializer_factor": 3.0,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": (
        "Bart",
        {
            "d_model": 128,
            "encoder_layers": 1,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
            "init_std": 0.2,
            "initializer_range": 0.2,
            "activation_function": "tanh",
            "decoder_start_token_id": 0,
            "forced_eos_token_id": None,
        },
    ),
}

_CONFIGURATIONS = {"Gemma3": "Gemma3TextConfig", "Gemma3n": "Gemma3nTextConfig"}

_CLASSES = {
    "GPT2": "GPT2LMHeadModel",
    "T5": "T5ForConditionalGeneration",
    "Bart": "BartForConditionalGeneration",
}

ARCHITECTURES = tuple(_MODELS)


def tiny_config(name: str, **changes: Any) -> Any:
    """A configuration with head dims of 32 or more."""
    family, options = _MODELS[name]
    kind = getattr(transformers, _CONFIGURATIONS.get(family, f"{family}Config"))
    return kind(**{**_COMMON, **options, **changes})


@functools.lru_cache
def tiny_model(name: str, attention: str = "sdpa", **changes: Any) -> Any:
    """A model with random weights; the same one for the same arguments."""
    family, _ = _MODELS[name]
    kind = getattr(transformers, _CLASSES.get(family, f"{family}ForCausalLM"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind._from_config(tiny_config(name, **changes), attn_implementation=attention)
        if model.config.is_encoder_decoder:
            # Tied to the embeddings, the output would repeat the last token whatever is cached.
            model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
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
