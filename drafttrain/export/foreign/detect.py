"""Which layout a folder has, told by its tensors and its config, never by its name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafttrain.errors import CheckpointError
from drafttrain.export.foreign.checkpoint import Checkpoint

EAGLE, EAGLE3, SPECULATORS = "eagle", "eagle3", "speculators"
MEDUSA, MEDUSA_ORIGINAL, CAUSAL_LM, GGUF = "medusa", "medusa-original", "causal-lm", "gguf"

FORMATS = {
    EAGLE: "EAGLE-1 and 2: the original layout, and what vLLM and SGLang load",
    EAGLE3: "EAGLE-3: the original layout, SpecForge, and what vLLM, SGLang and TensorRT-LLM load",
    SPECULATORS: "EAGLE-3 with speculators_config",
    MEDUSA: "Medusa as vLLM loads it",
    MEDUSA_ORIGINAL: "Medusa's original layout",
    CAUSAL_LM: "a causal LM as transformers stores it",
    GGUF: "a causal LM as llama.cpp loads it, not quantised",
}
_NUMBERED = re.compile(r"^(medusa_heads?\.)?\d+\.\d+\.(linear\.)?(weight|bias)$")
_BLOCKS = re.compile(r"^(medusa_heads?\.)?blocks\.\d+\.layers\.\d+\.weight$")
_HIDDEN_NORM = re.compile(r"(^|\.)(midlayer|layers\.0)\.hidden_norm\.weight$")
_FIRST_LAYER = re.compile(r"(^|\.)layers\.0\.self_attn\.q_proj\.weight$")
# Families that this project does not train, by what gives them away.
_OTHERS = {"mask_hidden": "P-EAGLE", "markov_w1": "DSpark", "mtp": "MTP"}


def evidence_of(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Layout -> what speaks for it."""
    config, names = checkpoint.config, checkpoint.tensors
    found: dict[str, list[str]] = {}

    def note(layout: str, what: str | None) -> None:
        if what is not None:
            found.setdefault(layout, []).append(what)

    kind = config.get("speculators_model_type")
    if config.get("speculators_config") is not None or kind is not None:
        note(SPECULATORS, f"config.json has speculators_model_type {kind!r}")
    fused = _first(names, lambda name: name.endswith("fc.weight"))
    hidden_norm = _first(names, _HIDDEN_NORM.search)
    if hidden_norm is not None and fused is not None:
        # A speculators folder holds the same tensors; its config decides.
        note(SPECULATORS if SPECULATORS in found else EAGLE3, f"tensor {hidden_norm}")
    elif fused is not None and (layer := _first(names, _FIRST_LAYER.search)) is not None:
        note(EAGLE, f"tensors {fused} and {layer}, and no hidden_norm")
    note(MEDUSA, _tensor(_first(names, _BLOCKS.match)))
    note(MEDUSA_ORIGINAL, _tensor(_first(names, _NUMBERED.match)))
    embedded = _first(names, lambda name: name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight")))
    if fused is None and embedded is not None and config.get("model_type") in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        beside_heads = any(name.startswith("medusa_head") for name in names)
        if not beside_heads:
            note(CAUSAL_LM, f"model_type {config['model_type']!r} and tensor {embedded}")
    if "general.architecture" in config:
        note(GGUF, f"a GGUF file of architecture {config['general.architecture']!r}")
    return found


def detect(checkpoint: Checkpoint, asked: str = "auto") -> str:
    """The folder's layout.

    Args:
        asked: a key of `FORMATS`, or "auto".

    Raises:
        CheckpointError: nothing known, several candidates, another one than was asked for, or a family that this
            project does not have.
    """
    _refuse_others(checkpoint)
    found = evidence_of(checkpoint)
    if asked != "auto":
        if asked not in FORMATS:
            raise CheckpointError(f"no format {asked!r}", where="--format", remedy=f"known are {', '.join(FORMATS)}")
        if asked not in found:
            raise CheckpointError(
                f"is not in format {asked} ({FORMATS[asked]}): {_told(found) or 'nothing speaks for any known one'}",
                where=checkpoint.folder,
                remedy="leave out --format, or give the draft's own folder",
            )
        return asked
    if len(found) == 1:
        return next(iter(found))
    if not found:
        names = ", ".join(sorted(checkpoint.tensors)[:6])
        raise CheckpointError(
            f"no known layout: its tensors are {names}{', ...' if len(checkpoint.tensors) > 6 else ''}",
            where=checkpoint.folder,
            remedy="known are " + "; ".join(f"{name} ({what})" for name, what in FORMATS.items()),
        )
    raise CheckpointError(
        f"could be any of {', '.join(found)}: {_told(found)}",
        where=checkpoint.folder,
        remedy="say which one is meant with --format",
    )


def _refuse_others(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    kind = config.get("speculators_model_type")
    architectures = " ".join(map(str, config.get("architectures") or []))
    other = next((name for mark, name in _OTHERS.items() if any(mark in key for key in checkpoint.tensors)), None)
    if kind not in (None, "eagle3"):
        other = f"{kind} in speculators' format"
    elif "DFlash" in architectures:
        other = "DFlash"
    if other is not None:
        raise CheckpointError(
            f"holds a draft of the family {other}, which drafttrain does not read",
            where=checkpoint.folder,
            remedy="EAGLE-1, EAGLE-3, Medusa and draft LMs can be imported",
        )


def _first(names: Iterable[str], test: Callable[[str], object]) -> str | None:
    return next((name for name in names if test(name)), None)


def _tensor(name: str | None) -> str | None:
    return None if name is None else f"tensor {name}"


def _told(found: dict[str, list[str]]) -> str:
    return "; ".join(f"{layout}: {', '.join(what)}" for layout, what in found.items())
