"""A draft LM in llama.cpp's terms: its metadata, and its tensors under their GGUF names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gguf import MODEL_ARCH, LlamaFileType, RopeScalingType, get_tensor_name_map
from torch import Tensor

from drafttrain.export.ir import DraftIR
from drafttrain.export.layout import Layout, no_family, refuse
from drafttrain.modeling.blocks import Rotary

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""model_type -> architecture. llama.cpp knows more; these are those whose logits were compared."""
_ENUM = {"llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3}
FILE_TYPES = {
    torch.float32: LlamaFileType.ALL_F32,
    torch.float16: LlamaFileType.MOSTLY_F16,
    torch.bfloat16: LlamaFileType.MOSTLY_BF16,
}
ROPE_FACTORS = "rope_freqs.weight"
_SUFFIXES = (".weight", ".bias")


def gguf_layout(ir: DraftIR) -> Layout:
    """Metadata and tensors; `complete` adds the tokenizer.

    Raises:
        ExportError: an architecture or an option that is not written, by name.
    """
    if ir.family != "draft_lm":
        raise no_family("gguf", ir.family, "drafttrain writes draft LMs alone in this form", "vllm")
    assert ir.lm_config is not None
    config = ir.lm_config
    _check(config)
    arch = ARCHITECTURES[config["model_type"]]
    tensors = {gguf_name(name, config): _stored(name, tensor, config) for name, tensor in ir.tensors.items()}
    if _rope(config)["rope_type"] == "llama3":
        tensors[ROPE_FACTORS] = rope_factors(config)
    metadata = {"general.architecture": arch, "general.name": "draft", **_metadata(arch, config)}
    metadata["general.file_type"] = int(FILE_TYPES[ir.dtype])
    notes = [] if arch == config["model_type"] else [f"{config['model_type']} is {arch} in llama.cpp"]
    return Layout(config=metadata, tensors=dict(sorted(tensors.items())), notes=notes)


def _check(config: Mapping[str, Any]) -> None:
    kind = config["model_type"]
    remedy = "export it --to hf and convert it with llama.cpp's own script"
    if kind not in ARCHITECTURES:
        raise refuse("gguf", f"model_type {kind}", f"only {', '.join(ARCHITECTURES)} are written", remedy)
    windowed = "sliding_attention" in (config.get("layer_types") or ())
    if windowed or (kind == "mistral" and config.get("sliding_window")):
        raise refuse("gguf", "sliding_window", "it is not written", remedy)
    if config.get("hidden_act", "silu") != "silu":
        raise refuse("gguf", f"hidden_act {config['hidden_act']}", "the architecture has silu", remedy)
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise refuse("gguf", key, "it is not written", remedy)
    rope = config.get("rope_parameters") or {}
    if "rope_type" not in rope or rope["rope_type"] not in ("default", "linear", "llama3"):
        raise refuse("gguf", f"rope_parameters {rope}", "only default, linear and llama3 are written", remedy)
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise refuse("gguf", "partial_rotary_factor", "the architecture turns whole heads", remedy)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = config["rope_parameters"]
    return rope


def head_dim(config: Mapping[str, Any]) -> int:
    """D."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _metadata(arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    rope, dim = _rope(config), head_dim(config)
    values: dict[str, Any] = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": dim,
        "attention.value_length": dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": dim,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    if rope["rope_type"] == "linear":
        values |= {"rope.scaling.type": RopeScalingType.LINEAR.value, "rope.scaling.factor": float(rope["factor"])}
    return {f"{arch}.{key}": value for key, value in values.items()}


def gguf_name(name: str, config: Mapping[str, Any]) -> str:
    """A tensor's name in GGUF."""
    names = get_tensor_name_map(_ENUM[ARCHITECTURES[config["model_type"]]], config["num_hidden_layers"])
    found: str | None = names.get_name(name, try_suffixes=_SUFFIXES)
    if found is None:
        raise refuse("gguf", f"tensor {name}", "the architecture has none like it", "export it --to hf")
    return found


def _stored(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """llama.cpp wants vectors in fp32, and Llama's q and k with the two halves of a head interleaved."""
    if tensor.dim() == 1:
        return tensor.float()
    heads = turned_heads(name, config)
    if heads is None:
        return tensor
    return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def unturned(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """The way back from the interleaved halves."""
    heads = turned_heads(name, config)
    if heads is None:
        return tensor
    return tensor.view(heads, -1, 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)


def turned_heads(name: str, config: Mapping[str, Any]) -> int | None:
    """Heads of a matrix whose rows are interleaved, else None."""
    if ARCHITECTURES[config["model_type"]] != "llama":
        return None
    if name.endswith("q_proj.weight"):
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if name.endswith("k_proj.weight") else None


def rope_factors(config: Mapping[str, Any]) -> Tensor:
    """What each rotary frequency is divided by, fp32 [D / 2]: how llama.cpp has Llama 3's scaling."""
    rope, dim, length = _rope(config), head_dim(config), int(config["max_position_embeddings"])
    plain = Rotary({"rope_type": "default", "rope_theta": rope["rope_theta"]}, dim, length)
    return plain.inv_freq / Rotary(dict(rope), dim, length).inv_freq
