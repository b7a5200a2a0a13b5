"""The folder of the speculators library, which vLLM serves by itself: it names target and draft tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from torch import Tensor

from drafttrain.errors import TargetError
from drafttrain.export.ir import DraftIR
from drafttrain.export.layout import Engine, Layout, no_family
from drafttrain.export.llama import check_eagle3, eagle3_tensors, llama_config
from drafttrain.export.tap_ids import KEY, tap_keys
from drafttrain.targets.config import TargetConfig

_NUMBER = "num_aux_hidden_states"
_DTYPE = "dtype"


def speculators_layout(ir: DraftIR) -> Layout:
    """Content of the folder, but for the target's name and the number of draft tokens.

    Raises:
        ExportError: a family or an option that the format lacks, by name.
    """
    if ir.family != "eagle3":
        raise no_family("speculators", ir.family, "of drafttrain's families it has EAGLE-3 alone", "vllm")
    check_eagle3("speculators", ir)
    keys, notes = tap_keys(ir, "vllm")
    layer = {**llama_config(ir, "LlamaForCausalLM"), "tie_word_embeddings": False}
    if KEY in keys:
        # vLLM takes fc's width from the layer's config alone.
        layer[_NUMBER] = keys[_NUMBER]
    config: dict[str, Any] = {
        # Without a model_type: vLLM looks for speculators_config only where there is none.
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        _DTYPE: layer[_DTYPE],
        "draft_vocab_size": ir.vocab_map.size,
        "norm_before_residual": ir.norms.before_residual,  # missing, it is on
        "norm_before_fc": ir.norms.before_fc,
        "fc_norm": ir.norms.per_tap,
        "norm_output": ir.norms.output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
    }
    if KEY in keys:
        config[KEY] = keys[KEY]
    notes = [note for note in notes if "eagle_config" not in note]
    return Layout(config=config, tensors=dict(sorted(_renamed(eagle3_tensors(ir)).items())), notes=notes)


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        f"layers.0.{name.removeprefix('midlayer.')}" if name.startswith("midlayer.") else name: tensor
        for name, tensor in tensors.items()
    }


def complete(ir: DraftIR, layout: Layout, folder: Path, target: str, k: int) -> Layout:
    """Name the target and how it is served: then `vllm serve <folder>` is enough."""
    speculators = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": k}],
        "verifier": {"name_or_path": target, "architectures": _architectures(target)},
    }
    return replace(layout, config={**layout.config, "speculators_config": speculators})


def _architectures(target: str) -> list[str]:
    """Of the target, where its config is at hand; the library's check of it is optional."""
    from drafttrain.targets.load import load_text_config

    try:
        return list(load_text_config(TargetConfig(model=target)).architectures or [])
    except TargetError:
        return []


def speculators_command(ir: DraftIR, folder: Path, target: str, k: int) -> str:
    """The folder names the target, whose weights vLLM loads."""
    return f"vllm serve {quote(str(folder))}"


SPECULATORS = Engine("speculators", "vLLM 0.32 (speculators format)", speculators_layout, speculators_command, complete)
