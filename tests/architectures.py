"""Tiny random models of the architectures that are odd in some way: those that work, and those that must be refused."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support import SHAPE, VOCAB

_MIXED = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1}
_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 5000.0, **values}}


WORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=32, attention_factor=1.3)),
    "llama-dynamic": ("llama", _rope("dynamic", factor=2.0)),
    "llama-linear": ("llama", _rope("linear", factor=2.0)),
    "llama-longrope": (
        "llama",
        _rope("longrope", short_factor=[1.0, 1.5] * 2, long_factor=[2.0] * 4, original_max_position_embeddings=64),
    ),
    "llama-head-dim": ("llama", {"head_dim": 16, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "phi3-window": ("phi3", {"sliding_window": 6, **_rope("default", partial_rotary_factor=0.5)}),
    "phi3-longrope": (
        "phi3",
        _rope("longrope", short_factor=[1.0, 1.5] * 2, long_factor=[2.0] * 4, original_max_position_embeddings=64),
    ),
    "gemma2-softcaps": (
        "gemma2",
        {"head_dim": 8, "sliding_window": 6, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3-two-bases": (
        "gemma3_text",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": _MIXED,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    ),
    "gemma4": ("gemma4_text", {**_GEMMA4, "num_kv_shared_layers": 0}),
    "gemma4-shared-kv": ("gemma4_text", {**_GEMMA4, "num_kv_shared_layers": 2}),
    "granite-multipliers": ("granite", _MULTIPLIERS),
    "granite4-dense": ("granitemoehybrid", {"layer_types": ["attention"] * 4, "num_local_experts": 0, **_MAMBA}),
    "cohere-parallel": ("cohere", {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2-nope": ("cohere2", {"layer_types": _MIXED, "sliding_window": 6, "head_dim": 8}),
    "olmo-clipped": ("olmo", {"clip_qkv": 2.0}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"layer_types": _MIXED, "sliding_window": 6}),
    "smollm3-nope": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    "stablelm": ("stablelm", {"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True}),
    "glm4": ("glm4", {"head_dim": 8, **_rope("default", partial_rotary_factor=0.5)}),
    "exaone4": ("exaone4", {"layer_types": _MIXED, "sliding_window": 6}),
    "helium": ("helium", {"head_dim": 8}),
    "nemotron": ("nemotron", _rope("default", partial_rotary_factor=0.5)),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "gpt-neox": ("gpt_neox", _rope("default", partial_rotary_factor=0.25)),
    "ministral": (
        "ministral",
        {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, **_EXPERTS}),
    "gpt-oss-sinks": ("gpt_oss", {"num_local_experts": 4, "head_dim": 8, "sliding_window": 6, **_EXPERTS}),
    "qwen2-moe": ("qwen2_moe", {"num_experts": 4, "shared_expert_intermediate_size": 16, **_EXPERTS}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 4, "head_dim": 8, **_EXPERTS}),
    "afmoe": ("afmoe", {"num_experts": 4, "head_dim": 8, "sliding_window": 6, "num_dense_layers": 1, **_EXPERTS}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, **_MULTIPLIERS}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "glm4-moe": (
        "glm4_moe",
        {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "head_dim": 8, **_EXPERTS},
    ),
    "deepseek-v2": ("deepseek_v2", {**_LATENT, "first_k_dense_replace": 1}),
    "deepseek-v3": ("deepseek_v3", {**_LATENT, "first_k_dense_replace": 1}),
    "glm4-moe-lite": ("glm4_moe_lite", {**_LATENT, "head_dim": 4}),
    "minicpm3": ("minicpm3", {**_LATENT, "head_dim": 4}),
}

_LINEAR = "layers of type 'linear_attention'"
_NO_LAYERS = r"no list of decoder layers [\s\S]*docs/targets\.md"
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "embeds-text": ("gemma3_text", {"head_dim": 8, "use_bidirectional_attention": True}, "see those behind them"),
    "gemma3n": (
        "gemma3n_text",
        {
            "head_dim": 8,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
        r"at tap 0 is \[4, 1, 8, 32\], where a draft reads \[1, 8, 32\]",
    ),
    "llama4": ("llama4_text", {"num_local_experts": 4, "head_dim": 8}, "layers of type 'chunked_attention'"),
    "qwen3-next": ("qwen3_next", {"num_experts": 4, "head_dim": 8, **_EXPERTS}, _LINEAR),
    "granite4-hybrid": (
        "granitemoehybrid",
        {"layer_types": ["mamba", "attention"] * 2, **_MAMBA},
        _LINEAR,
    ),
    "qwen3.5": ("qwen3_5_text", {"head_dim": 8}, _LINEAR),
    "mamba": ("mamba", {}, _LINEAR),
    "mamba2": ("mamba2", {"head_dim": 16, "num_heads": 4, "n_groups": 1}, _LINEAR),
    "jamba": (
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4, "mamba_d_state": 8},
        _LINEAR,
    ),
    "bamba": ("bamba", {"attn_layer_indices": [1, 3], **_MAMBA}, _LINEAR),
    "falcon-h1": ("falcon_h1", {"mamba_d_ssm": 64, **_MAMBA}, "layers of type 'hybrid'"),
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention"] * 2,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "head_dim": 8,
        },
        _LINEAR,
    ),
    "recurrent-gemma": ("recurrent_gemma", {"head_dim": 8, "lru_width": 32}, _LINEAR),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, "layers of type 'conv'"),
    "rwkv": ("rwkv", {}, "keeps a recurrent state"),
    "xlstm": ("xlstm", {"num_heads": 4}, "keeps a recurrent state"),
    "gpt2": ("gpt2", {}, _NO_LAYERS),
    "gptj": ("gptj", {"n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4}, _NO_LAYERS),
    "bloom": ("bloom", {}, _NO_LAYERS),
    "falcon": ("falcon", {}, _NO_LAYERS),
    "mpt": ("mpt", {}, _NO_LAYERS),
    "bart": (
        "bart",
        {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "encoder_layers": 2},
        r"no final norm [\s\S]*docs/targets\.md",
    ),
    "doge": ("doge", {}, "does not run here"),
    "longcat": (
        "longcat_flash",
        {**_LATENT, "num_layers": 2, "head_dim": 4, "ffn_hidden_size": 16, "expert_ffn_hidden_size": 16},
        "in 2 blocks",
    ),
}


NAMED: dict[str, str] = {
    "Llama": "llama3-rope",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Mistral": "mistral-window",
    "Ministral": "ministral",
    "Phi-1 and 2": "phi",
    "Phi-3 and 4": "phi3-window",
    "Gemma 1": "gemma",
    "Gemma 2": "gemma2-softcaps",
    "Gemma 3": "gemma3-two-bases",
    "Gemma 4": "gemma4",
    "Granite 3": "granite-multipliers",
    "dense Granite 4": "granite4-dense",
    "Cohere 1": "cohere-parallel",
    "Cohere 2": "cohere2-nope",
    "OLMo 1": "olmo-clipped",
    "OLMo 2": "olmo2",
    "OLMo 3": "olmo3",
    "SmolLM3": "smollm3-nope",
    "StableLM": "stablelm",
    "GLM-4": "glm4",
    "EXAONE 4": "exaone4",
    "Helium": "helium",
    "Nemotron": "nemotron",
    "StarCoder2": "starcoder2",
    "GPT-NeoX": "gpt-neox",
    "GPT-OSS (with its attention sinks)": "gpt-oss-sinks",
    "Mixtral": "mixtral",
    "Qwen2-MoE": "qwen2-moe",
    "Qwen3-MoE": "qwen3-moe",
    "AFMoE": "afmoe",
    "GraniteMoE": "granitemoe",
    "OLMoE": "olmoe",
    "GLM-4-MoE": "glm4-moe",
    "DeepSeek V2": "deepseek-v2",
    "DeepSeek V3": "deepseek-v3",
    "GLM-4.7-Flash": "glm4-moe-lite",
    "MiniCPM3": "minicpm3",
    "Mamba": "mamba",
    "Mamba 2": "mamba2",
    "Jamba": "jamba",
    "Bamba": "bamba",
    "Falcon-H1": "falcon-h1",
    "Granite 4 hybrids": "granite4-hybrid",
    "Qwen3-Next": "qwen3-next",
    "Qwen3.5": "qwen3.5",
    "Nemotron-H": "nemotron-h",
    "RecurrentGemma": "recurrent-gemma",
    "RWKV": "rwkv",
    "xLSTM": "xlstm",
    "LFM2": "lfm2",
    "Llama 4": "llama4",
    "Gemma 3n": "gemma3n",
    "LongCat-Flash": "longcat",
    "GPT-2": "gpt2",
    "GPT-J": "gptj",
    "BLOOM": "bloom",
    "Falcon 1": "falcon",
    "MPT": "mpt",
    "BART": "bart",
    "models that embed text (`use_bidirectional_attention`)": "embeds-text",
}
"""The kinds that docs/targets.md names -> the model that stands for each here or in `tests.support.KINDS`."""


def odd_hf(name: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of `WORKS` or `REFUSED`, fp32, eval; its norms and biases are no ones and zeros."""
    kind, extra = {**WORKS, **REFUSED}[name][:2]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SHAPE, **extra, **changes})
    hf: Any = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return hf
