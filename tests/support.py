"""Tiny random models built in the process, and inputs shared by tests."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from drafttrain.modeling.causal_lm import CausalLM

VOCAB = 61

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Large enough that a random model's argmax is no near-tie.
    "initializer_range": 0.4,
}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama3-rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 6}),
    "gemma": ("GemmaConfig", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 6}),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", {}),
    "granite": ("GraniteConfig", {"logits_scaling": 2.0}),
    "cohere": ("CohereConfig", {}),
}

RAGGED_PROMPTS: list[list[int]] = [
    [5, 9, 13, 4],
    [7],
    [3, 3, 8, 21, 40, 11, 12, 13, 14],
    [50, 51, 52, 50, 51],
    [6, 17],
    [30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42],
    [20, 10, 20, 10, 20],
]


def tiny_hf(kind: str = "llama", seed: int = 0, **changes: Any) -> Any:
    """A random transformers model of an architecture in `KINDS`, fp32, eval."""
    name, extra = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, name)(**{**SHAPE, **extra, **changes})
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def tiny_target(kind: str = "llama", seed: int = 0, **changes: Any) -> CausalLM:
    """The same, wrapped and frozen."""
    model = CausalLM(tiny_hf(kind, seed, **changes))
    return model.requires_grad_(False).eval()
