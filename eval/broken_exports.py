"""Exports with one fault each, as other tools and hands leave them, made from a sound one.

    python eval/broken_exports.py runs/smollm2-eagle3/export/vllm broken --target smollm2-135m

writes broken/<fault> for every fault that fits the export's family, and prints what `drafttrain doctor` says of each.
What a real server does with them is in tests/serving/test_broken.py, and in LOG.md.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.draft import open_draft
from drafttrain.export.doctor.registry import lint
from drafttrain.export.doctor.target import read_target
from drafttrain.export.sidecar import read_sidecar
from drafttrain.export.tap_ids import KEY
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
        spoil: changes config and tensors in place.
        needs: a tensor that must be there, such as d2t.
    """

    families: tuple[str, ...]
    rule: str
    spoil: Spoil
    needs: str = ""


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


_E3, _E13 = ("eagle3",), ("eagle1", "eagle3")
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
}
"""By name. Besides these, `spoil` knows "cut-off": a file that was copied in part."""
CUT_OFF, CUT_OFF_RULE = "cut-off", "incomplete"


def fits(fault: Fault, family: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    """Whether a sound export can be given this fault."""
    has = {
        "": True,
        "d2t": "d2t" in tensors,
        "!d2t": "d2t" not in tensors,
        "ids": KEY in config and "eagle_config" in config,
        "theta": config.get("rope_theta") not in (None, 10000.0, 50.0),
    }
    return family in fault.families and has[fault.needs]


def spoil(sound: Path, folder: Path, name: str) -> Path:
    """Write `folder`, a copy of a sound export with the fault `name`."""
    shutil.copytree(sound, folder)
    if name == CUT_OFF:
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[: len(data) * 2 // 3])
        return folder
    config, tensors = read_json(folder / "config.json"), load_file(folder / WEIGHTS)
    FAULTS[name].spoil(config, tensors)
    write_json(folder / "config.json", config)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def main() -> None:
    """Write them all and print what the doctor says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("export", type=Path, help="a sound export of drafttrain for vLLM")
    parser.add_argument("out", type=Path, help="folder for the broken ones")
    parser.add_argument("--target", required=True)
    options = parser.parse_args()
    facts = read_target(TargetConfig(model=options.target))
    family = open_draft(options.export).family
    config, tensors = read_json(options.export / "config.json"), load_file(options.export / WEIGHTS)
    names = [name for name, fault in FAULTS.items() if fits(fault, str(family), config, tensors)]
    for name in (*names, CUT_OFF):
        folder = spoil(options.export, options.out / name, name)
        findings = lint(Case(open_draft(folder), facts, about=read_sidecar(folder)))
        print(f"{name}: {'; '.join(f'{finding.rule} ({finding.severity})' for finding in findings)}")


if __name__ == "__main__":
    main()
