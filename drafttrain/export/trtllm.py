"""TensorRT-LLM (PyTorch backend): EAGLE-3 and draft LMs, with the part of the server's config that starts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import yaml

from drafttrain.export.hf import lm_layout
from drafttrain.export.ir import DraftIR
from drafttrain.export.layout import Engine, Layout, no_family, refuse
from drafttrain.export.llama import check_eagle3, eagle3_options, eagle3_tensors, llama_config
from drafttrain.export.tap_ids import is_default, ordered_taps, trtllm_id
from drafttrain.modeling.taps import Tap

OPTIONS, SPECULATIVE = "llm_api_options.yaml", "speculative_config"
"""The file with options of the server, and their part that speaks of the draft."""
DECODING = {"eagle3": "Eagle3", "draft_lm": "Draft_Target"}
"""Family -> its `decoding_type`."""
CAPTURED = "eagle3_layers_to_capture"
"""Its key for the layers, counted as outputs, whose states an EAGLE-3 draft reads."""


def read_options(folder: Path) -> dict[str, Any] | None:
    """The options beside a checkpoint, with a `speculative_config` among them; None where there is no such file.

    Raises:
        ValueError: a file that cannot be read, or is of something else.
    """
    path = folder / OPTIONS
    if not path.is_file():
        return None
    try:
        options = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{OPTIONS} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(options, dict) or not isinstance(options.get(SPECULATIVE), dict):
        raise ValueError(f"{OPTIONS} holds no {SPECULATIVE}")
    return options


def trtllm_layout(ir: DraftIR) -> Layout:
    """Content of the folder.

    Raises:
        ExportError: a family or an option that TensorRT-LLM's PyTorch backend lacks, by name.
    """
    if ir.family in ("eagle1", "medusa"):
        raise no_family("trtllm", ir.family, "its PyTorch backend has EAGLE-3 and draft models alone", "vllm")
    if ir.family == "draft_lm":
        return _with_dtype(lm_layout(ir))
    return _eagle3(ir)


def _eagle3(ir: DraftIR) -> Layout:
    check_eagle3("trtllm", ir)
    if ir.norms.before_residual:
        raise refuse("trtllm", "drafter.norm_before_residual", "its residual is the raw state", "export it --to vllm")
    if ir.layers > 1:
        raise refuse(
            "trtllm",
            f"drafter.num_layers {ir.layers}",
            "it names the parts of further layers otherwise",
            "train one layer, or export it --to vllm",
        )
    if len(ir.taps) == 1:
        raise refuse(
            "trtllm",
            f"drafter.taps {ir.taps[0]}",
            "with a single state it has no fc",
            "train on two states or more, or export it --to vllm",
        )
    if Tap.block(0) in ir.taps:
        raise refuse(
            "trtllm",
            "drafter.taps 0",
            "it counts outputs of layers: the embedding is none",
            "train on inputs of later blocks, or export it --to vllm",
        )
    options = eagle3_options(ir)
    if options.pop("norm_before_fc", False):
        options["eagle_config"] = {"norm_before_fc": True}
    config = {**llama_config(ir, "LlamaForCausalLMEagle3"), **options}
    if not is_default(ir):
        config["num_aux_hidden_states"] = len(ir.taps)  # not read there, but by whoever reads the folder alone
    # It finds the map by comparing the two vocabularies; offsets, as everywhere.
    return _with_dtype(Layout(config=config, tensors=eagle3_tensors(ir), notes=[_tap_note(ir)]))


def _with_dtype(layout: Layout) -> Layout:
    """The name of the key before transformers 5, which its modules read."""
    return replace(layout, config={**layout.config, "torch_dtype": layout.config["dtype"]})


def _tap_note(ir: DraftIR) -> str:
    names = ", ".join(str(tap) for tap in ordered_taps(ir))
    if is_default(ir):
        return f"taps {names} are the default of the engine: no layer ids are written"
    return f"taps {names} -> {CAPTURED} {_ids(ir)} (outputs of layers) in {OPTIONS}"


def _ids(ir: DraftIR) -> list[int]:
    return [trtllm_id(tap, ir.sizes.target_layers) for tap in ordered_taps(ir)]


def complete(ir: DraftIR, layout: Layout, folder: Path, target: str, k: int) -> Layout:
    """Add the server's config."""
    speculative: dict[str, Any] = {
        "decoding_type": DECODING[ir.family],
        "max_draft_len": k,
        "speculative_model": str(folder),
    }
    if ir.family == "eagle3" and not is_default(ir):
        speculative[CAPTURED] = _ids(ir)
    text = yaml.safe_dump({SPECULATIVE: speculative}, sort_keys=False)
    return replace(layout, files={**layout.files, OPTIONS: text})


def trtllm_command(ir: DraftIR, folder: Path, target: str, k: int) -> str:
    """`trtllm-serve` with the options beside the checkpoint."""
    return f"trtllm-serve {quote(target)} --extra_llm_api_options {quote(str(folder / OPTIONS))}"


TRTLLM = Engine("trtllm", "TensorRT-LLM 1.4", trtllm_layout, trtllm_command, complete)
