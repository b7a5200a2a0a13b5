"""From a folder made elsewhere to the intermediate form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafttrain.drafters.saving import DraftMeta, check_target
from drafttrain.errors import CheckpointError
from drafttrain.export.foreign.checkpoint import Checkpoint, read_checkpoint
from drafttrain.export.foreign.detect import CAUSAL_LM, EAGLE, EAGLE3, GGUF, SPECULATORS, detect
from drafttrain.export.foreign.eagle import read_eagle1, read_eagle3
from drafttrain.export.foreign.gguf_read import read_gguf
from drafttrain.export.foreign.lm import read_lm
from drafttrain.export.foreign.medusa import read_medusa
from drafttrain.export.foreign.target import Target
from drafttrain.export.ir import DraftIR
from drafttrain.export.rebuild import IMPORTED, check_ir, config_of
from drafttrain.export.sidecar import read_sidecar
from drafttrain.targets.config import TargetConfig


@dataclass(frozen=True)
class ForeignDraft:
    """A draft made elsewhere.

    Attributes:
        ir: the draft.
        layout: the format that was read, a key of `detect.FORMATS`.
        notes: what was converted, dropped or assumed.
    """

    ir: DraftIR
    layout: str
    notes: list[str]


def read_foreign(
    folder: str | Path,
    target: TargetConfig | None = None,
    *,
    layout: str = "auto",
    taps: Sequence[int | str] | None = None,
) -> ForeignDraft:
    """Read a draft that another tool wrote, or an export of this one. The target's weights are not loaded.

    Args:
        folder: with config.json and weights (safetensors, or pickled tensors).
        target: what it was made for; default: the one that the folder names.
        layout: a key of `detect.FORMATS`, or "auto".
        taps: states that an EAGLE-3 draft reads, where the folder does not say it or is wrong.

    Raises:
        CheckpointError: an unknown or ambiguous layout, parts that are not understood, a draft for another target.
        TargetError: the target's config, tokenizer or files cannot be found.
    """
    checkpoint = read_checkpoint(folder)
    found = detect(checkpoint, layout)
    about = Target(target or _named_target(checkpoint))
    if taps is not None and found not in (EAGLE3, SPECULATORS):
        raise CheckpointError(f"taps have no meaning for format {found}", where="--taps", remedy="leave it out")
    if found in (EAGLE3, SPECULATORS):
        ir, notes = read_eagle3(checkpoint, about, taps)
    elif found == EAGLE:
        ir, notes = read_eagle1(checkpoint, about)
    elif found == CAUSAL_LM:
        ir, notes = read_lm(checkpoint, about)
    elif found == GGUF:
        ir, notes = read_gguf(checkpoint, about)
    else:
        ir, notes = read_medusa(checkpoint, about)
    ir = _with_sidecar(ir, checkpoint, about)
    origin: dict[str, Any] = {
        "from": str(Path(folder).resolve()),
        "files": list(checkpoint.files),
        "format": found,
        "notes": notes,
    }
    about_us = read_sidecar(folder)
    if about_us is not None:
        origin |= {"claims": about_us["forecast"], "trained": about_us["provenance"]}
    ir = replace(ir, provenance={IMPORTED: origin})
    check_ir(ir, folder)
    return ForeignDraft(ir, found, notes)


def _with_sidecar(ir: DraftIR, checkpoint: Checkpoint, target: Target) -> DraftIR:
    """What an export of ours says beside the engine's config: the steps trained, and for which target.

    Raises:
        CheckpointError: it was made for another target.
    """
    about = read_sidecar(checkpoint.folder)
    if about is None:
        return ir
    config = config_of(ir)
    meta = DraftMeta(config, {}, int(target.identity["vocab_size"]), about["target"])
    check_target(meta, target.identity, where=checkpoint.folder)
    return replace(ir, depth=int(about["depth"]))


def _named_target(checkpoint: Checkpoint) -> TargetConfig:
    """What stands beside an export of ours, in speculators' config, or among its tags."""
    config = checkpoint.config
    about = read_sidecar(checkpoint.folder) or {}
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    name = (
        (about.get("target") or {}).get("name") or verifier.get("name_or_path") or config.get("base_model_name_or_path")
    )
    if not name:
        raise CheckpointError(
            "does not say which target it was made for", where=checkpoint.folder, remedy="name it with --target"
        )
    path = Path(str(name)).expanduser()
    if path.is_absolute() and not path.exists():
        raise CheckpointError(
            f"was made for {name}, which is not there", where=checkpoint.folder, remedy="say where it is with --target"
        )
    return TargetConfig(model=str(name))
