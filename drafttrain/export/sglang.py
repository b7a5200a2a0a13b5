"""SGLang: EAGLE-3, EAGLE-1 and draft LMs."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

import torch

from drafttrain.export.hf import lm_layout
from drafttrain.export.ir import DraftIR
from drafttrain.export.layout import Engine, Layout, named_like, no_family, refuse
from drafttrain.export.llama import check_eagle3, eagle1_tensors, eagle3_options, eagle3_tensors, llama_config
from drafttrain.export.tap_ids import tap_keys

ALGORITHMS = {"eagle3": "EAGLE3", "eagle1": "EAGLE", "draft_lm": "STANDALONE"}
"""Family -> `--speculative-algorithm`. EAGLE for an EAGLE-3 draft skips fc in silence and accepts nothing."""


def sglang_layout(ir: DraftIR) -> Layout:
    """Content of the folder.

    Raises:
        ExportError: a family or an option that SGLang lacks, by name.
    """
    if ir.family == "medusa":
        raise no_family("sglang", ir.family, "it has no Medusa", "vllm")
    return {"eagle3": _eagle3, "eagle1": _eagle1, "draft_lm": lm_layout}[ir.family](ir)


def _eagle3(ir: DraftIR) -> Layout:
    check_eagle3("sglang", ir)
    if ir.norms.before_residual:
        raise refuse(
            "sglang",
            "drafter.norm_before_residual",
            "its residual is the raw state",
            "train without it, or export it --to vllm",
        )
    if ir.layers > 1:
        raise refuse(
            "sglang",
            f"drafter.num_layers {ir.layers}",
            "it names the norms of layers beyond the first otherwise",
            "train one layer, or export it --to vllm",
        )
    if len(ir.taps) == 1:
        raise refuse(
            "sglang",
            f"drafter.taps {ir.taps[0]}",
            "states as wide as an embedding go past fc, in silence",
            "train on two states or more, or export it --to vllm",
        )
    keys, notes = tap_keys(ir, "sglang")
    if keys:
        notes.append("SGLang counts otherwise for DeepSeek and gpt-oss targets: for those, train on the default taps")
    config = {**llama_config(ir, "LlamaForCausalLMEagle3"), **eagle3_options(ir), **keys}
    return Layout(config=config, tensors=eagle3_tensors(ir), notes=notes)


def _eagle1(ir: DraftIR) -> Layout:
    config = llama_config(ir, "LlamaForCausalLMEagle")
    if ir.bias:
        return Layout(config=config, tensors=eagle1_tensors(ir))
    bias = torch.zeros(ir.sizes.hidden_size, dtype=ir.dtype)
    return Layout(
        config=config,
        tensors=named_like(eagle1_tensors(ir), {"fc.bias": bias}),
        notes=["fc.bias: zeros, since SGLang's fc always has a bias"],
    )


def sglang_command(ir: DraftIR, folder: Path, target: str, k: int) -> str:
    """A server that drafts chains of k tokens; trees need other values of the last two flags."""
    return (
        f"python -m sglang.launch_server --model-path {quote(target)} --speculative-algorithm {ALGORITHMS[ir.family]} "
        f"--speculative-draft-model-path {quote(str(folder))} --speculative-num-steps {k} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {k + 1}"
    )


SGLANG = Engine("sglang", "SGLang 0.5.23", sglang_layout, sglang_command)
