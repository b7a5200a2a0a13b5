"""Exports with one fault each, as other tools and hands leave them, made from a sound one.

    python eval/broken_exports.py runs/smollm2-eagle3/export/vllm broken --target smollm2-135m

writes broken/<fault> for every fault that fits the export's engine (vLLM or TensorRT-LLM) and family, and prints what
`drafttrain doctor` says of each. What a real vLLM does with them is in tests/serving/test_broken.py, and in LOG.md.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.export.doctor.case import Case, engine_for
from drafttrain.export.doctor.draft import open_draft
from drafttrain.export.doctor.registry import lint
from drafttrain.export.doctor.target import read_target
from drafttrain.export.sidecar import read_sidecar
from drafttrain.export.tap_ids import KEY
from drafttrain.export.trtllm import CAPTURED, OPTIONS, SPECULATIVE, read_options
from drafttrain.files import read_json, write_json
from drafttrain.targets.config import TargetConfig

WEIGHTS = "model.safetensors"
Spoil = Callable[[dict[str, Any], dict[str, Tensor]], None]


@dataclass(frozen=True)
class Fault:
    """A trap.

    Attributes:
        families: of the drafts that it can happen to.
        rule: of the doctor that names it.
        spoil: changes config, or the options of the server, and tensors in place.
        needs: a tensor that must be there, such as d2t.
        engine: that the export is for.
        options: whether it lies in the options beside the export, not in its config.
    """

    families: tuple[str, ...]
    rule: str
    spoil: Spoil
    needs: str = ""
    engine: str = "vllm"
    options: bool = False

    def values(self, export: Path) -> dict[str, Any]:
        """What `spoil` changes beside the tensors, of an export of that engine."""
        found: dict[str, Any] = read_json(export / "config.json")
        if self.options:
            options = read_options(export)
            assert options is not None
            found = options[SPECULATIVE]
        return found


def _absolute(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(tensors["d2t"].numel())


def _no_map(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors["d2t"], tensors["t2d"]


def _other_mask(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["t2d"] = tensors["t2d"].roll(1)


def _full_map(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["d2t"] = torch.zeros(config["vocab_size"], dtype=torch.int64)
    tensors["t2d"] = torch.ones(config["vocab_size"], dtype=torch.bool)


def _no_draft_size(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del config["draft_vocab_size"]


def _fc_width(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """As an exporter that forgets the taps writes an fc over two or four of them."""
    width = tensors["fc.weight"].shape[0]
    for key in ("num_aux_hidden_states", KEY, "eagle_config"):
        config.pop(key, None)
    if tensors["fc.weight"].shape[1] == 3 * width:
        tensors["fc.weight"] = tensors["fc.weight"][:, : 2 * width].contiguous()


def _shifted_ids(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config[KEY] = config["eagle_config"][KEY]


def _no_ids(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del config[KEY], config["eagle_config"]


def _rotary_base(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    wrong = 50.0 if config["rope_theta"] != 50.0 else 10000.0
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = wrong


def _no_rotary(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for key in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"):
        config.pop(key, None)


def _two_bases(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["rope_parameters"]["rope_theta"] = 50.0


def _no_norm(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors["midlayer.hidden_norm.weight"]


def _centred_norms(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """As copied from a target whose norms multiply by 1 + weight."""
    for name in tensors:
        if "norm" in name:
            tensors[name] = tensors[name] - 1


def _fc_bias(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    fc = tensors["fc.weight"]
    tensors["fc.bias"] = fc.float().std() * torch.ones(fc.shape[0], dtype=fc.dtype)


def _bias_key(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["bias"] = True


def _tied(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["tie_word_embeddings"] = True


def _no_head(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del tensors["lm_head.weight"]


def _short_vocabulary(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The tokenizer's size where the padded one belongs."""
    config["vocab_size"] -= 7


def _short_context(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["max_position_embeddings"] //= 8


def _architecture(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["architectures"] = ["DraftForCausalLM"]


def _quantised(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}


def _nan(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    name = next(iter(sorted(tensors)))
    for name in ("fc.weight", "blocks.0.layers.0.weight"):
        if name in tensors:
            tensors[name] = tensors[name].clone()
            tensors[name][0, 0] = torch.nan


def _zero(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = torch.zeros_like(tensors["fc.weight"])


def _lost_matrix(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if name.endswith("mlp.down_proj.weight")]:
        del tensors[name]


def _copied_layers(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["num_hidden_layers"] = 8


def _activation(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["hidden_act"] = "gelu_pytorch_tanh"


def _mixed(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["fc.weight"] = tensors["fc.weight"].half()


def _narrow(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["hidden_size"] //= 2


def _shipped_head(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = torch.ones(config["vocab_size"], config["hidden_size"])


def _too_many_heads(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["num_heads"] += 2


def _block_bias(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    width = config["hidden_size"]
    tensors |= {f"blocks.{i}.layers.0.bias": torch.ones(width) for i in range(config["num_heads"])}


def _shared_blocks(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    for i in range(1, config["num_heads"]):
        tensors[f"blocks.{i}.layers.0.weight"] = tensors["blocks.0.layers.0.weight"].clone()


def _no_torch_dtype(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """As transformers 5 writes it."""
    del config["torch_dtype"]


def _norm_outside(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Where vLLM reads it."""
    config |= config.pop("eagle_config")


def _two_layers(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["num_hidden_layers"] = 2
    tensors |= {
        name.replace("midlayer.", "layers.1."): value.clone()
        for name, value in tensors.items()
        if name.startswith("midlayer.")
    }


def _raw_residual(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    config["norm_before_residual"] = True


def _captured_inputs(options: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """In vLLM's numbering."""
    options[CAPTURED] = [layer + 1 for layer in options[CAPTURED]]


def _default_captured(options: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    del options[CAPTURED]


def _beyond_the_target(options: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    options[CAPTURED] = [*options[CAPTURED][:-1], 1000]


def _captured_text(options: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    options[CAPTURED] = ", ".join(map(str, options[CAPTURED]))


def _other_decoding(options: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    options["decoding_type"] = "MTP"


def _no_draft_length(options: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    options["max_draft_len"] = 0


def _elsewhere(options: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """As they are after the export was moved."""
    options["speculative_model"] = "/models/where-it-was"


_E3, _E13 = ("eagle3",), ("eagle1", "eagle3")
_TRT = ("eagle3", "draft_lm")
FAULTS: dict[str, Fault] = {
    "absolute-d2t": Fault(_E3, "d2t-absolute", _absolute, "d2t"),
    "no-d2t": Fault(_E3, "d2t-missing", _no_map, "d2t"),
    "other-t2d": Fault(_E3, "d2t-t2d", _other_mask, "d2t"),
    "full-map": Fault(_E3, "full-map", _full_map, "!d2t"),
    "no-draft-vocab-size": Fault(_E3, "draft-vocab-size", _no_draft_size, "d2t"),
    "fc-width": Fault(_E3, "fc-width", _fc_width),
    "shifted-layer-ids": Fault(_E3, "layer-ids-convention", _shifted_ids, "ids"),
    "no-layer-ids": Fault(_E3, "layer-ids-convention", _no_ids, "ids"),
    "rotary-base": Fault(_E13, "rope-theta", _rotary_base),
    "no-rotary": Fault(_E13, "rope-absent", _no_rotary, "theta"),
    "two-rotary-bases": Fault(_E13, "rope-conflict", _two_bases, "theta"),
    "no-norm": Fault(_E3, "missing-norm", _no_norm),
    "centred-norms": Fault(_E3, "norm-flavour", _centred_norms),
    "fc-bias": Fault(_E13, "fc-bias", _fc_bias),
    "bias-key": Fault(_E13, "bias-key", _bias_key),
    "tied-head": Fault(_E3, "tied-head", _tied),
    "no-head": Fault(_E3, "missing-head", _no_head, "d2t"),
    "tokenizer-sized-vocabulary": Fault(_E13, "vocab-size", _short_vocabulary),
    "short-context": Fault(_E13, "context-length", _short_context),
    "architecture": Fault((*_E13, "medusa"), "architecture", _architecture),
    "quantised": Fault(_E13, "quantised-draft", _quantised),
    "nan": Fault((*_E13, "medusa"), "not-finite", _nan),
    "zero-fc": Fault(_E13, "zero-weights", _zero),
    "lost-matrix": Fault(_E13, "missing-tensors", _lost_matrix),
    "copied-layer-count": Fault(_E13, "layer-count", _copied_layers),
    "activation": Fault(_E13, "activation", _activation),
    "mixed-types": Fault(_E13, "dtype", _mixed),
    "narrow": Fault(_E13, "hidden-size", _narrow),
    "shipped-head": Fault(("eagle1",), "eagle1-extras", _shipped_head),
    "too-many-heads": Fault(("medusa",), "medusa-heads", _too_many_heads),
    "block-bias": Fault(("medusa",), "medusa-bias", _block_bias),
    "shared-blocks": Fault(("medusa",), "shared-blocks", _shared_blocks),
    "no-torch-dtype": Fault(_TRT, "torch-dtype", _no_torch_dtype, engine="trtllm"),
    "outer-norm-switch": Fault(_E3, "norm-switches", _norm_outside, "inner norm", engine="trtllm"),
    "second-layer": Fault(_E3, "layer-count", _two_layers, engine="trtllm"),
    "raw-residual": Fault(_E3, "engine-lacks", _raw_residual, engine="trtllm"),
    "captured-inputs": Fault(_E3, "layer-ids-convention", _captured_inputs, "captured", "trtllm", options=True),
    "default-captured": Fault(_E3, "layer-ids-convention", _default_captured, "captured", "trtllm", options=True),
    "captured-beyond": Fault(_E3, "layer-ids-range", _beyond_the_target, "captured", "trtllm", options=True),
    "captured-text": Fault(_E3, "options", _captured_text, "captured", "trtllm", options=True),
    "other-decoding": Fault(_TRT, "options", _other_decoding, engine="trtllm", options=True),
    "no-draft-length": Fault(_TRT, "options", _no_draft_length, engine="trtllm", options=True),
    "moved": Fault(_TRT, "options-place", _elsewhere, engine="trtllm", options=True),
}
"""By name. Besides these, `spoil` knows "cut-off": a file that was copied in part."""
CUT_OFF, CUT_OFF_RULE = "cut-off", "incomplete"


def fits(fault: Fault, export: Path, engine: str, family: str) -> bool:
    """Whether a sound export for this engine can be given this fault."""
    if engine != fault.engine or family not in fault.families:
        return False
    config, tensors = fault.values(export), load_file(export / WEIGHTS)
    has = {
        "": True,
        "d2t": "d2t" in tensors,
        "!d2t": "d2t" not in tensors,
        "ids": KEY in config and "eagle_config" in config,
        "theta": config.get("rope_theta") not in (None, 10000.0, 50.0),
        "inner norm": config.get("eagle_config") == {"norm_before_fc": True},
        "captured": CAPTURED in config,
    }
    return has[fault.needs]


def spoil(sound: Path, folder: Path, name: str) -> Path:
    """Write `folder`, a copy of a sound export with the fault `name`."""
    shutil.copytree(sound, folder)
    if name == CUT_OFF:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[: len(data) * 2 // 3])
        return folder
    fault, tensors = FAULTS[name], load_file(folder / WEIGHTS)
    config, options = read_json(folder / "config.json"), read_options(folder)
    if options is not None:
        options[SPECULATIVE]["speculative_model"] = str(folder)  # the copy is no fault
    fault.spoil(options[SPECULATIVE] if fault.options and options is not None else config, tensors)
    write_json(folder / "config.json", config)
    if options is not None:
        (folder / OPTIONS).write_text(yaml.safe_dump(options), encoding="utf-8")
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def main() -> None:
    """Write them all and print what the doctor says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="a sound export of drafttrain for vLLM or TensorRT-LLM")
    parser.add_argument("out", type=Path, help="folder for the broken ones")
    parser.add_argument("--target", required=True)
    options = parser.parse_args()
    facts = read_target(TargetConfig(model=options.target))
    sound = open_draft(options.export)
    engine = engine_for(sound, read_sidecar(options.export))
    names = [name for name, fault in FAULTS.items() if fits(fault, options.export, engine, str(sound.family))]
    for name in (*names, CUT_OFF):
        folder = spoil(options.export, options.out / name, name)
        findings = lint(Case(open_draft(folder), facts, engine, read_sidecar(folder)))
        print(f"{name}: {'; '.join(f'{finding.rule} ({finding.severity})' for finding in findings)}")


if __name__ == "__main__":
    main()
