"""Hugging Face configs and weights of a draft LM."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.errors import TargetError
from drafttrain.modeling.causal_lm import CausalLM

_LAYER = re.compile(r"^(.*\blayers\.)(\d+)(\..*)$")

_DROPOUT = re.compile(r"dropout|pdrop")
"""`attention_dropout`, `resid_pdrop` and their like."""

_OF_EACH_BLOCK = ("layer_types", "mlp_layer_types", "no_rope_layers", "num_attention_heads_per_layer")
"""Lists of a config that say what each block is: its attention, its experts, whether it rotates."""


def draft_text_config(config: DraftLMConfig, text: Any) -> Any:
    """The Hugging Face config of the draft for a target with text config `text`."""
    if config.init == "checkpoint":
        found = _load_config(str(config.checkpoint)).get_text_config()
        if found.vocab_size != text.vocab_size:
            raise TargetError(
                f"the draft has {found.vocab_size} tokens, the target {text.vocab_size}",
                where=config.checkpoint,
                remedy="choose a checkpoint with the target's tokenizer",
            )
        return found
    draft = copy.deepcopy(text)
    if config.init == "target_layers":
        layers = config.layers_for(text.num_hidden_layers)
        if layers[-1] >= text.num_hidden_layers:
            raise ValueError(f"layers: the target has blocks 0..{text.num_hidden_layers - 1}, not {layers[-1]}")
    else:
        assert config.num_layers is not None
        layers = tuple(range(config.num_layers))
        _resize(draft, config)
    draft.num_hidden_layers = len(layers)
    for name in _OF_EACH_BLOCK:
        value = getattr(text, name, None)
        if value is not None:
            setattr(draft, name, [value[index % len(value)] for index in layers])
    if hasattr(text, "first_k_dense_replace"):
        draft.first_k_dense_replace = sum(index < text.first_k_dense_replace for index in layers)
    return draft


def _resize(draft: Any, config: DraftLMConfig) -> None:
    if config.hidden_size is not None or config.num_heads is not None:
        heads = config.num_heads or draft.num_attention_heads
        hidden = config.hidden_size or draft.hidden_size
        if hidden % heads:
            raise ValueError(f"hidden_size {hidden} is not a multiple of num_heads {heads}")
        draft.hidden_size, draft.num_attention_heads = hidden, heads
        draft.head_dim = hidden // heads
        kv_heads = getattr(draft, "num_key_value_heads", None) or heads
        draft.num_key_value_heads = kv_heads if heads % kv_heads == 0 else heads
    if config.num_kv_heads is not None:
        draft.num_key_value_heads = config.num_kv_heads
    heads, kv_heads = draft.num_attention_heads, draft.num_key_value_heads
    if heads % kv_heads:
        raise ValueError(f"num_heads {heads} is not a multiple of num_kv_heads {kv_heads}")
    if config.intermediate_size is not None:
        draft.intermediate_size = config.intermediate_size


def _load_config(name: str) -> Any:
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise TargetError(
            f"no model can be loaded from here: {str(error).splitlines()[0]}",
            where=name,
            remedy="give a folder with config.json and safetensors weights, or a hub name",
        ) from None


def text_config_from(arch: dict[str, Any]) -> Any:
    """A Hugging Face config from its JSON form."""
    values = dict(arch)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def new_model(text: Any, device: torch.device | str | None) -> Any:
    """A causal LM with fresh fp32 weights, in train mode, without dropout, whatever the config says of it.

    A draft learns the target's distribution, not noise, and attention over packed rows has no place for it.
    """
    text = copy.deepcopy(text)
    for name, value in text.to_dict().items():
        if _DROPOUT.search(name) and isinstance(value, float):
            setattr(text, name, 0.0)
    with torch.device(device or "cpu"):
        model: Any = AutoModelForCausalLM.from_config(text, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return model.train()


@torch.no_grad()
def copy_blocks(draft: CausalLM, target: CausalLM, layers: tuple[int, ...]) -> None:
    """Draft block i becomes the target's block layers[i]; embedding, final norm and head are copied."""
    source = target.hf.state_dict()
    for name, tensor in draft.hf.state_dict().items():
        match = _LAYER.match(name)
        wanted = name if match is None else f"{match[1]}{layers[int(match[2])]}{match[3]}"
        if wanted not in source or source[wanted].shape != tensor.shape:
            raise ValueError(f"the target has no tensor {wanted} of shape {tuple(tensor.shape)} to start from")
        tensor.copy_(source[wanted])


@torch.no_grad()
def copy_checkpoint(draft: CausalLM, name: str) -> None:
    """Load the weights of another causal LM, safetensors only."""
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, use_safetensors=True)
    except (OSError, ValueError) as error:
        raise TargetError(
            f"no weights can be loaded from here: {str(error).splitlines()[0]}",
            where=name,
            remedy="only safetensors are read; convert pickled weights with `save_pretrained`",
        ) from None
    draft.hf.load_state_dict(loaded.state_dict())
