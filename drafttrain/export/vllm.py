"""vLLM: EAGLE-3, EAGLE-1, Medusa and draft LMs in their raw layouts."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

from drafttrain.export.hf import lm_layout
from drafttrain.export.ir import DraftIR
from drafttrain.export.layout import Engine, Layout, named_like, refuse
from drafttrain.export.llama import check_eagle3, eagle1_tensors, eagle3_options, eagle3_tensors, llama_config
from drafttrain.export.tap_ids import tap_keys
from drafttrain.export.target_head import NAME, reads_target_head

METHODS = {"eagle3": "eagle3", "eagle1": "eagle", "medusa": "medusa", "draft_lm": "draft_model"}
"""Family -> the method of `--speculative-config`. Without it vLLM guesses from the path."""


def vllm_layout(ir: DraftIR) -> Layout:
    """Content of the folder.

    Raises:
        ExportError: an option that vLLM lacks, by name.
    """
    return {"eagle3": _eagle3, "eagle1": _eagle1, "medusa": _medusa, "draft_lm": lm_layout}[ir.family](ir)


def _eagle3(ir: DraftIR) -> Layout:
    check_eagle3("vllm", ir)
    keys, notes = tap_keys(ir, "vllm")
    config = {**llama_config(ir, "LlamaForCausalLMEagle3"), **eagle3_options(ir), **keys}
    if ir.norms.before_residual:
        config["norm_before_residual"] = True
    if ir.layers > 1:
        notes.append(f"{ir.layers} draft layers: vLLM alone reads layers beyond the first in this form")
    return Layout(config=config, tensors=eagle3_tensors(ir), notes=notes)


def _eagle1(ir: DraftIR) -> Layout:
    if ir.bias:
        raise refuse(
            "vllm",
            "drafter.fc_bias",
            "its fc has no bias, and one that is there is dropped silently",
            "train it further without the bias, or export it --to sglang",
        )
    # vLLM puts "Eagle" before the architecture itself. A head, a first norm or a bias of fc must not be there.
    return Layout(config=llama_config(ir, "LlamaForCausalLM"), tensors=eagle1_tensors(ir))


def _medusa(ir: DraftIR) -> Layout:
    arch = ir.sizes
    tensors, notes = ir.tensors, []
    shared = reads_target_head(ir)
    if shared:
        if ir.target_head is None:
            raise refuse(
                "vllm",
                "drafter.head target",
                "a Medusa checkpoint must bring its heads, and this draft reads the target's, which is not at hand",
                "give the target's checkpoint, or train with drafter.head=own",
            )
        tensors = {**tensors, NAME: ir.target_head}
        notes.append(f"{NAME}: a copy of the target's head, which all heads read (original_lm_head)")
    # No key with "heads" or "layers" but these two: vLLM takes every such key for one of them.
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "dtype": str(ir.dtype).removeprefix("torch."),
        "hidden_size": arch.target_hidden_size,
        "vocab_size": arch.vocab_size,
        "truncated_vocab_size": arch.vocab_size,
        "num_heads": ir.heads,
        "num_hidden_layers": ir.layers,
        "original_lm_head": shared,
        "medusa_fc_bias": ir.bias,
        "max_position_embeddings": arch.max_position_embeddings,
        "tie_word_embeddings": False,
    }
    return Layout(config=config, tensors=named_like(tensors, {}), notes=notes)


def vllm_command(ir: DraftIR, folder: Path, target: str, k: int) -> str:
    """`vllm serve` with the draft."""
    speculative = {"method": METHODS[ir.family], "model": str(folder), "num_speculative_tokens": k}
    return f"vllm serve {quote(target)} --speculative-config {quote(json.dumps(speculative))}"


VLLM = Engine("vllm", "vLLM 0.32", vllm_layout, vllm_command)
