"""EAGLE drafts: the original layouts, SpecForge's, speculators', and what serving engines load."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafttrain.export.foreign.checkpoint import Checkpoint
from drafttrain.export.foreign.parts import Reading
from drafttrain.export.foreign.taps import read_taps
from drafttrain.export.foreign.target import Target
from drafttrain.export.ir import DraftIR, Norms
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap, looks_absolute
from drafttrain.targets.stored import head_names

_PREFIXES = ("draft_model.", "module.")
_LATER = re.compile(r"^(?:layers|midlayer)\.([1-9]\d*)\.(.*)$")
_BIASES = tuple(
    f"{part}.bias"
    for part in (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
    )
)
# The steps that the papers' own recipes train; a checkpoint does not say.
_DEPTH3, _DEPTH1 = 7, 1


def read_eagle3(checkpoint: Checkpoint, target: Target, taps: Sequence[int | str] | None) -> tuple[DraftIR, list[str]]:
    """EAGLE-3, from tensors named `midlayer.*` or `layers.0.*`."""
    reading = Reading.of(checkpoint, target, _PREFIXES)
    _flatten_speculators(reading)
    reading.left = {_canonical(name): tensor for name, tensor in reading.left.items()}
    for name in [name for name in reading.left if name.startswith("verifier_")]:
        del reading.left[name]
        reading.notes.append(f"{name}: dropped, it is the target's")
    reading.drop_target_parts()
    later = sorted({int(match[1]) for name in reading.left if (match := re.match(r"layers\.(\d+)\.", name))})
    for prefix in ("midlayer", *(f"layers.{i}" for i in later)):
        _rename_state_norm(reading, prefix)
        for name in _BIASES:
            reading.drop_zero(f"{prefix}.{name}", "the family's layer")
    reading.drop_zero("fc.bias", "EAGLE-3's fc")
    fc = reading.need("fc.weight")
    arch = reading.layer_arch(fc.shape[0], "midlayer.self_attn.q_proj.weight", "midlayer.mlp.gate_proj.weight")
    if arch.hidden_size != arch.target_hidden_size:
        raise reading.error(
            f"the draft is {arch.hidden_size} wide and the target {arch.target_hidden_size}",
            "give the target that the draft was made for; a draft with its own embedding cannot be imported",
        )
    count, rest = divmod(fc.shape[1], arch.target_hidden_size)
    if rest or not count:
        raise reading.error(f"fc.weight reads {fc.shape[1]} features, no multiple of {arch.target_hidden_size}")
    vocab_map = _vocab_map(reading, reading.need("lm_head.weight").shape[0], arch.vocab_size)
    chosen = read_taps(reading, count, arch.target_layers, taps)
    ir = DraftIR(
        family="eagle3",
        tensors=dict(reading.left),
        taps=chosen,
        vocab_map=vocab_map,
        arch=arch,
        layers=1 + len(later),
        heads=1,
        norms=_norms(reading),
        lm_config=None,
        depth=_DEPTH3,
        target=target.identity,
    )
    return ir, reading.notes


def read_eagle1(checkpoint: Checkpoint, target: Target) -> tuple[DraftIR, list[str]]:
    """EAGLE-1 and 2: fc and one layer without its first norm."""
    reading = Reading.of(checkpoint, target, (*_PREFIXES, "model."))
    reading.drop_target_parts()
    reading.drop_copy("lm_head.weight", head_names(target.config), "head")
    for name in _BIASES:
        reading.drop_zero(f"layers.0.{name}", "the family's layer")
    more = sorted({name.split(".")[1] for name in reading.left if re.match(r"layers\.[1-9]", name)})
    if more:
        raise reading.error(f"{1 + len(more)} layers: the family has one", "such a draft cannot be imported")
    if "layers.0.input_layernorm.weight" in reading.left:
        raise reading.error(
            "layers.0.input_layernorm.weight: the family's layer does not norm its input",
            "such a draft cannot be imported; no engine serves it either",
        )
    fc = reading.need("fc.weight")
    bias = reading.left.get("fc.bias")
    if bias is not None and not bool(bias.any()):
        reading.drop_zero("fc.bias", "")
        bias = None
    arch = reading.layer_arch(fc.shape[0], "layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate_proj.weight")
    if fc.shape[0] != arch.target_hidden_size or fc.shape[1] != 2 * arch.target_hidden_size:
        raise reading.error(
            f"fc.weight is {tuple(fc.shape)}, for this target it has to be "
            f"({arch.target_hidden_size}, {2 * arch.target_hidden_size})",
            "give the target that the draft was made for",
        )
    own = reading.config.get("vocab_size")
    if own is not None and own > arch.vocab_size:
        raise reading.error(
            f"the draft has {own} tokens, the target {arch.vocab_size}", "give the target that it was made for"
        )
    ir = DraftIR(
        family="eagle1",
        tensors=dict(reading.left),
        taps=(Tap.final,),
        vocab_map=VocabMap.full(arch.vocab_size),
        arch=arch,
        layers=1,
        heads=1,
        norms=Norms(),
        lm_config=None,
        depth=_DEPTH1,
        target=target.identity,
        bias=bias is not None,
    )
    return ir, reading.notes


def _flatten_speculators(reading: Reading) -> None:
    """speculators keeps the layer's config apart from the draft's."""
    layer = reading.config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        return
    if "norm_before_residual" not in reading.config:
        # As vLLM reads it; the library itself always writes the key.
        reading.config["norm_before_residual"] = True
        reading.notes.append("norm_before_residual: not in config.json, on as vLLM takes it")
    reading.config = {**layer, **{k: v for k, v in reading.config.items() if k != "transformer_layer_config"}}


def _canonical(name: str) -> str:
    later = _LATER.match(name)
    if later is not None:
        return f"layers.{later[1]}.{later[2]}"
    for first in ("layers.0.", "midlayer.0."):
        name = f"midlayer.{name.removeprefix(first)}" if name.startswith(first) else name
    return name


def _rename_state_norm(reading: Reading, prefix: str) -> None:
    """Layers beyond the first norm the state alone: as `hidden_norm` in SGLang and TensorRT-LLM."""
    theirs, ours = f"{prefix}.hidden_norm.weight", f"{prefix}.input_layernorm.weight"
    if prefix != "midlayer" and theirs in reading.left and ours not in reading.left:
        reading.left[ours] = reading.left.pop(theirs)
        reading.notes.append(f"{theirs} -> {ours}")


def _norms(reading: Reading) -> Norms:
    """The switches. Tensors and config.json must agree on those that have tensors."""
    config = reading.config
    nested: dict[str, Any] = config.get("eagle_config") or {}
    flags = {
        "norm_before_fc": bool(config.get("norm_before_fc") or nested.get("norm_before_fc")),
        "fc_norm": bool(config.get("fc_norm")),
    }
    for flag, prefix in (("norm_before_fc", "input_norm."), ("fc_norm", "fc_norm.")):
        there = any(name.startswith(prefix) for name in reading.left)
        if there != flags[flag]:
            raise reading.error(
                f"config.json says {flag} {str(flags[flag]).lower()}, but tensors {prefix}* are "
                f"{'there' if there else 'missing'}",
                f"set {flag} to {str(there).lower()} if the draft was trained so",
            )
    return Norms(
        before_fc=flags["norm_before_fc"],
        per_tap=flags["fc_norm"],
        output=bool(config.get("norm_output") or nested.get("return_hidden_post_norm")),
        before_residual=bool(config.get("norm_before_residual")),
    )


def _vocab_map(reading: Reading, size: int, vocab_size: int) -> VocabMap:
    """From d2t, offsets; t2d is made anew, since some folders lack it and others pad it differently."""
    d2t, t2d = reading.left.pop("d2t", None), reading.left.pop("t2d", None)
    if size > vocab_size:
        raise reading.error(
            f"the draft says {size} tokens, the target {vocab_size}", "give the target that it was made for"
        )
    if d2t is None:
        own = reading.config.get("vocab_size", vocab_size)
        if size != own:
            raise reading.error(
                f"the head has {size} rows for a vocabulary of {own}, and no d2t says which tokens they are",
                "get the whole checkpoint: without the map nothing would be accepted",
            )
        if size < vocab_size:
            reading.notes.append(f"vocabulary: the target's first {size} of {vocab_size} ids, the others are padding")
        return VocabMap.full(vocab_size) if size == vocab_size else VocabMap.from_ids(range(size), vocab_size)
    d2t = d2t.to(torch.int64)
    if t2d is not None and looks_absolute(d2t, t2d) and bool((d2t != 0).any()):
        raise reading.error(
            "d2t holds absolute target ids; it must hold offsets: target id = i + d2t[i]",
            "subtract the row number from each entry, or let `drafttrain doctor --fix` do it",
        )
    ids = d2t + torch.arange(d2t.numel())
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    if not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise reading.error(
            f"d2t leads to ids outside the target's {vocab_size}", "give the target that the draft was made for"
        )
    mask[ids] = True
    _check_mask(reading, mask, t2d)
    try:
        return VocabMap(d2t, mask)
    except ValueError as error:
        raise reading.error(f"bad vocabulary map: {error}") from None


def _check_mask(reading: Reading, mask: Tensor, t2d: Tensor | None) -> None:
    if t2d is None:
        reading.notes.append("t2d: not there, made from d2t")
        return
    shared = min(mask.numel(), t2d.numel())
    beyond = bool(t2d[shared:].any()) or bool(mask[shared:].any())
    if beyond or not torch.equal(mask[:shared], t2d[:shared].to(torch.bool)):
        raise reading.error("d2t and t2d name different sets of target ids", "get the checkpoint anew")
    if t2d.numel() != mask.numel():
        reading.notes.append(f"t2d: over {t2d.numel()} ids -> {mask.numel()}, the target's")
