"""Mend what can be mended without a person, and write the mended copy: whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from safetensors.torch import save_file

from drafttrain.errors import UserError
from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.draft import CONFIG, RawDraft, open_draft
from drafttrain.export.doctor.finding import Finding
from drafttrain.export.doctor.registry import lint
from drafttrain.export.doctor.weights import INDEX, read_tensor
from drafttrain.export.sidecar import read_sidecar
from drafttrain.export.trtllm import OPTIONS, SPECULATIVE
from drafttrain.files import atomic_folder, require_free_space, write_json

WEIGHTS = "model.safetensors"
_MOST = 50
"""A mend can lay another fault open, but not without end."""


@dataclass(frozen=True)
class Mended:
    """What mending came to.

    Attributes:
        case: with all changes, nothing of it written.
        mended: findings whose mends were applied, in order.
        left: what the rules still find.
    """

    case: Case
    mended: list[Finding]
    left: list[Finding]


def mend_case(case: Case, first: Collection[Finding] = (), ignored: Collection[str] = ()) -> Mended:
    """Apply the mends of `first`, then those of what the rules find, until nothing fixable is left."""
    done: list[Finding] = []
    wanted = list(first)
    while True:
        for finding in wanted:
            if finding.mend is not None:
                case = replace(case, draft=case.draft.mended(finding.mend))
                done.append(finding)
        left = lint(case, ignored)
        # One at a time: two rules may mend the same key, and the second would not be needed any more. None twice: a
        # mend that did not help, or one that shows in the written copy alone.
        tried = {(finding.rule, finding.what) for finding in done}
        wanted = [finding for finding in left if finding.fixable and (finding.rule, finding.what) not in tried][:1]
        if not wanted or len(done) > _MOST:
            return Mended(case, done, left)


def write_copy(draft: RawDraft, out: str | Path) -> None:
    """Write a draft with its changes as safetensors; other files are copied as they are.

    Raises:
        UserError: the folder exists, the disk is full, or a file cannot be read.
    """
    out = Path(out)
    if out.exists():
        raise UserError("already exists", where=out, remedy="give another folder, or remove this one")
    size = sum(path.stat().st_size for path in draft.folder.rglob("*") if path.is_file())
    require_free_space(out.parent, size + (1 << 20))
    try:
        with atomic_folder(out) as partial:
            _copy_others(draft, partial)
            _write_weights(draft, partial)
            write_json(partial / CONFIG, draft.config)
            if draft.options is not None:
                _write_options(draft.options, partial, out)
    except (OSError, SafetensorError) as raised:
        raise UserError(f"cannot be written: {raised}", where=out, remedy="free some space") from None


def _copy_others(draft: RawDraft, partial: Path) -> None:
    ours = {file.name for file in draft.weights.files} | {CONFIG, INDEX, OPTIONS}
    for path in sorted(draft.folder.iterdir()):
        if path.is_file() and path.name not in ours and path.suffix != ".safetensors":
            shutil.copy2(path, partial / path.name)


def _write_options(options: Mapping[str, Any], partial: Path, out: Path) -> None:
    """They say where the draft lies, which is the copy now."""
    moved = {**options, SPECULATIVE: {**options[SPECULATIVE], "speculative_model": str(out)}}
    (partial / OPTIONS).write_text(yaml.safe_dump(moved, sort_keys=False), encoding="utf-8")


def _write_weights(draft: RawDraft, partial: Path) -> None:
    """One file for each that there was, so that no more than a shard is in memory; new tensors go into the first."""
    index: dict[str, str] = {}
    names = []
    for number, file in enumerate(draft.weights.files):
        name = file.name if file.suffix == ".safetensors" else f"{file.stem}.safetensors"
        if len(draft.weights.files) == 1:
            name = WEIGHTS
        tensors = {
            stored: draft.changed[stored] if stored in draft.changed else read_tensor(info, stored)
            for stored, info in draft.weights.tensors.items()
            if info.file == file and stored in draft.stored
        }
        if number == 0:
            tensors |= {new: tensor for new, tensor in draft.changed.items() if new not in draft.weights.tensors}
        if draft.weights.pickled:  # they may share memory, which safetensors refuses
            tensors = {stored: tensor.clone() for stored, tensor in tensors.items()}
        save_file({key: tensors[key].contiguous() for key in sorted(tensors)}, partial / name, {"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        names.append(name)
    if len(names) > 1:
        total = sum((partial / name).stat().st_size for name in names)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}, indent=2)
        (partial / INDEX).write_text(text + "\n", encoding="utf-8")


def relint(case: Case, out: Path, ignored: Collection[str] = ()) -> list[Finding]:
    """The findings of a written copy, read from the disk."""
    return lint(replace(case, draft=open_draft(out), about=read_sidecar(out)), ignored)
