"""Draft LMs in GGUF files: those that `export --to gguf` writes, and others without quantised tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafttrain.drafters.lm.hf import new_model, text_config_from
from drafttrain.export.foreign.checkpoint import Checkpoint
from drafttrain.export.foreign.lm import config_json, lm_ir
from drafttrain.export.foreign.parts import Reading
from drafttrain.export.foreign.target import Target
from drafttrain.export.gguf_model import ARCHITECTURES, ROPE_FACTORS, gguf_name, rope_factors, unturned
from drafttrain.export.gguf_tokenizer import tokens_of
from drafttrain.export.ir import DraftIR
from drafttrain.modeling.blocks import rope_parameters_of
from drafttrain.targets.load import load_tokenizer

_EMBEDDING = "token_embd.weight"
# Config key -> key of the metadata behind the architecture's name.
_SIZES = {
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}


def read_gguf(checkpoint: Checkpoint, target: Target) -> tuple[DraftIR, list[str]]:
    """A causal LM with the target's tokens."""
    reading = Reading.of(checkpoint, target)
    arch = str(reading.config.get("general.architecture"))
    if arch not in ARCHITECTURES.values():
        raise reading.error(f"architecture {arch}: only {', '.join(sorted(set(ARCHITECTURES.values())))} are read")
    tokens = reading.config.get("tokenizer.ggml.tokens")
    vocab_size = int(target.identity["vocab_size"])
    if tokens is not None and tokens != tokens_of(load_tokenizer(target.config), vocab_size)[0]:
        raise reading.error(
            f"its tokens are not those of {target.config.model}", "give the target that the draft was made for"
        )
    config = _config(reading, arch)
    text = text_config_from(config)
    dtype = reading.need(_EMBEDDING).dtype
    tensors: dict[str, Tensor] = {}
    names, seen = new_model(text, "meta").state_dict(keep_vars=True), set()
    for name, parameter in names.items():
        if id(parameter) in seen:
            continue  # tied
        seen.add(id(parameter))
        stored = reading.left.pop(gguf_name(name, config), None)
        if stored is None:
            raise reading.error(f"lacks the tensor {gguf_name(name, config)}")
        tensors[name] = unturned(name, stored, config).to(dtype)
    reading.finish({})
    return lm_ir(reading, text, tensors), reading.notes


def _config(reading: Reading, arch: str) -> dict[str, Any]:
    values: dict[str, Any] = {"model_type": arch}
    for key, theirs in _SIZES.items():
        value = reading.config.get(f"{arch}.{theirs}")
        if value is not None:
            values[key] = _decimal(value) if isinstance(value, float) else value
    values.setdefault("vocab_size", reading.need(_EMBEDDING).shape[0])
    values["tie_word_embeddings"] = "output.weight" not in reading.left
    base = _decimal(reading.config.get(f"{arch}.rope.freq_base", 10000.0))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": base}
    kind = reading.config.get(f"{arch}.rope.scaling.type", "none")
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": _decimal(reading.config[f"{arch}.rope.scaling.factor"])}
    elif kind != "none":
        raise reading.error(f"rotary scaling {kind!r} is not read")
    values["rope_parameters"] = rope
    factors = reading.left.pop(ROPE_FACTORS, None)
    if factors is not None:
        # The file holds what comes out of Llama 3's scaling, not its parameters: they are the target's, or unknown.
        values["rope_parameters"] = rope_parameters_of(reading.target.text)
        same = values["rope_parameters"]["rope_type"] == "llama3" and values["rope_parameters"]["rope_theta"] == base
        if not same or not torch.equal(rope_factors(values), factors):
            raise reading.error(f"{ROPE_FACTORS} is not the target's scaling", "give the target that it was made for")
        reading.notes.append(f"{ROPE_FACTORS}: the target's Llama 3 scaling")
    return config_json(text_config_from(values))


def _decimal(value: float) -> float:
    """The shortest decimal that is this fp32 number: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
