"""Draft LMs as ordinary Hugging Face checkpoints: for transformers' assisted generation, and for engines that take
a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafttrain.export.ir import DraftIR
from drafttrain.export.layout import Engine, Layout, named_like, no_family
from drafttrain.export.llama import rope_keys

# Of the process that trained, not of the model.
_FOREIGN = ("_name_or_path", "transformers_version", "output_attentions", "output_hidden_states", "return_dict")


def lm_layout(ir: DraftIR) -> Layout:
    """config.json and the weights; a tied head is stored once and said to be tied."""
    assert ir.lm_config is not None
    config: dict[str, Any] = {
        key: value
        for key, value in ir.lm_config.items()
        if not key.startswith("_") and key not in _FOREIGN and key != "torch_dtype"
    }
    config["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]]
    config["dtype"] = str(ir.dtype).removeprefix("torch.")
    rope = config.get("rope_parameters")
    if rope and "rope_theta" in rope:  # parameters by layer type have no older form
        config.update(rope_keys(rope))
    return Layout(config=config, tensors=named_like(ir.tensors, {}))


def hf_layout(ir: DraftIR) -> Layout:
    """A checkpoint that `assistant_model` takes."""
    if ir.family != "draft_lm":
        raise no_family("transformers", ir.family, "assisted generation takes causal LMs only", "vllm")
    return lm_layout(ir)


def hf_command(ir: DraftIR, folder: Path, target: str, k: int) -> str:
    """A script: transformers has no server of its own for this."""
    return "\n".join(
        [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f"tokenizer = AutoTokenizer.from_pretrained({target!r})",
            f"target = AutoModelForCausalLM.from_pretrained({target!r})",
            f"draft = AutoModelForCausalLM.from_pretrained({str(folder)!r}, dtype=target.dtype)",
            f"draft.generation_config.num_assistant_tokens = {k}",
            'draft.generation_config.num_assistant_tokens_schedule = "constant"',
            "draft.generation_config.assistant_confidence_threshold = 0.0",
            'inputs = tokenizer("Once upon a time", return_tensors="pt")',
            "print(tokenizer.decode(target.generate(**inputs, assistant_model=draft, max_new_tokens=64)[0]))",
        ]
    )


HF = Engine("hf", "transformers 5.24", hf_layout, hf_command)
