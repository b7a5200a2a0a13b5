"""Medusa heads: the original layout with numbered modules, and vLLM's."""

from __future__ import annotations

import re

from torch import Tensor

from drafttrain.export.foreign.checkpoint import Checkpoint
from drafttrain.export.foreign.parts import Reading
from drafttrain.export.foreign.target import Target
from drafttrain.export.ir import DraftIR, Norms
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap

_PREFIXES = ("medusa_heads.", "medusa_head.")
_LINEAR = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_HEAD = re.compile(r"^(\d+)\.(\d+)\.weight$")
_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")


def read_medusa(checkpoint: Checkpoint, target: Target) -> tuple[DraftIR, list[str]]:
    """Heads of either layout. How many there are is told by the tensors: published configs are wrong about it."""
    reading = Reading.of(checkpoint, target)
    prefix = next((p for p in _PREFIXES if any(name.startswith(p) for name in reading.left)), "")
    beside = [name for name in reading.left if not name.startswith(prefix)]
    if beside:
        reading.notes.append(f"{len(beside)} tensors beside {prefix}* are the target's and are not read")
    reading.left = {
        _canonical(name.removeprefix(prefix)): tensor
        for name, tensor in reading.left.items()
        if name.startswith(prefix)
    }
    blocks = [match for name in reading.left if (match := _BLOCK.match(name))]
    heads, layers = 1 + max(int(match[1]) for match in blocks), 1 + max(int(match[2]) for match in blocks)
    for key, found in (("num_heads", heads), ("medusa_num_heads", heads), ("medusa_num_layers", layers)):
        if reading.config.get(key, found) != found:
            reading.notes.append(f"config.json says {key} {reading.config[key]}, the tensors are of {found}")
    bias = any(match[3] == "bias" for match in blocks)
    if bias and not any(bool(reading.left[match[0]].any()) for match in blocks if match[3] == "bias"):
        for match in blocks:
            if match[3] == "bias":
                reading.drop_zero(match[0], "")
        bias = False
    elif bias and reading.config.get("medusa_fc_bias") is False:
        reading.notes.append("medusa_fc_bias is false, so vLLM drops the biases of the blocks: they are kept here")
    if "token_map" in reading.left:
        raise reading.error(
            "token_map: heads over a part of the vocabulary", "such a draft cannot be imported; vLLM fails on it, too"
        )
    arch = target.arch.model_copy(update={"vocab_size": int(target.identity["vocab_size"])})
    _heads(reading, heads, arch.vocab_size)
    width = reading.need("blocks.0.layers.0.weight").shape[0]
    if width != arch.target_hidden_size:
        raise reading.error(
            f"the heads read {width} features, the target has {arch.target_hidden_size}",
            "give the target that they were made for",
        )
    ir = DraftIR(
        family="medusa",
        tensors=dict(reading.left),
        taps=(Tap.final,),
        vocab_map=VocabMap.full(arch.vocab_size),
        arch=arch,
        layers=layers,
        heads=heads,
        norms=Norms(),
        lm_config=None,
        depth=heads,
        target=target.identity,
        bias=bias,
    )
    return ir, reading.notes


def _canonical(name: str) -> str:
    if (match := _LINEAR.match(name)) is not None:
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if (match := _HEAD.match(name)) is not None:
        return f"lm_heads.{match[1]}.weight"
    return name


def _heads(reading: Reading, heads: int, vocab_size: int) -> None:
    """Own heads, or one that stands for all: the target's, or a shared one of their own."""
    names = sorted(name for name in reading.left if name.startswith("lm_heads.") or name == "lm_head.weight")
    rows = {reading.left[name].shape[0] for name in names}
    if rows - {vocab_size}:
        raise reading.error(
            f"the heads have {sorted(rows)} rows, the target's vocabulary {vocab_size}",
            "give the target that they were made for",
        )
    if len(names) != 1 or (heads == 1 and not reading.config.get("original_lm_head")):
        return
    shared: Tensor = reading.left.pop(names[0])
    if reading.target.has_head(shared):
        reading.notes.append(f"{names[0]}: dropped, all heads read the target's")
        return
    reading.left |= {f"lm_heads.{i}.weight": shared for i in range(heads)}
    reading.notes.append(f"{names[0]}: one head for all, which is not the target's: copied for each")
