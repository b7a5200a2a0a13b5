"""Export a run's draft: refuse first, write whole folders or none, re-read what was written."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafttrain.drafters.saving import find_draft, weights_sha256
from drafttrain.errors import UserError
from drafttrain.export.card import model_card
from drafttrain.export.forecast import Forecast, forecast
from drafttrain.export.gguf_file import GGUF
from drafttrain.export.hf import HF
from drafttrain.export.ir import DraftIR, ExportError, read_ir
from drafttrain.export.layout import Engine, Layout
from drafttrain.export.measured import Evidence
from drafttrain.export.sglang import SGLANG
from drafttrain.export.sidecar import SIDECAR, read_sidecar, sidecar
from drafttrain.export.speculators import SPECULATORS
from drafttrain.export.stream import write_safetensors
from drafttrain.export.target_head import target_of, with_target_head
from drafttrain.export.trtllm import TRTLLM
from drafttrain.export.verify import CONFIG, WEIGHTS, verify_export
from drafttrain.export.vllm import VLLM
from drafttrain.files import atomic_folder, require_free_space, write_json
from drafttrain.recipe.load import load_recipe
from drafttrain.recipe.schema import RESOLVED, Recipe
from drafttrain.targets import embedded

ENGINES = {engine.name: engine for engine in (VLLM, SPECULATORS, SGLANG, TRTLLM, HF, GGUF)}
CARD = "README.md"
_NUMBER = re.compile(r"\d+(?:\.\d+)*")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exported:
    """One written folder.

    Attributes:
        engine: its name.
        folder: where it lies.
        notes: what was converted, and measurements that are not of this draft.
        command: how it is served.
        nbytes: size of the weights.
        expected: what the server's counters should show, where the draft was measured.
    """

    engine: str
    folder: Path
    notes: list[str]
    command: str
    nbytes: int
    expected: Forecast | None = None


def export_draft(
    run: str | Path,
    engines: Sequence[str],
    out: str | Path | None = None,
    *,
    k: int | None = None,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
) -> list[Exported]:
    """Write a folder for each engine. The target's weights are not read, but for one tensor: see `target_head`.

    Args:
        run: a run's folder, or a saved draft.
        engines: names in `ENGINES`, or `name@version`.
        out: a folder of that name is made in it for each engine; default: `export/` in the run.
        k: draft tokens a round in the serving command; default: what the run measured with.
        dtype: of the weights; default: the target's where the run's recipe is there, else as stored. Engines
            run a draft in the target's dtype whatever is stored.
        overwrite: replace exports that are there. Each stays until the new one is whole.

    Raises:
        ExportError: an unknown engine or version, an option that it lacks, an output folder that exists and is not to
            be replaced, or is no export. Nothing is written then.
        CheckpointError: no finished draft, or a damaged one.
    """
    chosen = [_engine(name) for name in dict.fromkeys(engines)]
    if not chosen:
        raise ExportError("no engine is named", where="--to", remedy=f"known are {', '.join(ENGINES)}")
    source = _Source.of(run)
    recipe = source.recipe
    if dtype is None and recipe is not None:
        dtype = getattr(torch, recipe.target.dtype)
    ir = read_ir(source.draft, dtype)
    if VLLM in chosen:
        ir = with_target_head(ir, recipe.target if recipe is not None else target_of(ir))
    k = draft_tokens(ir, k, recipe.evaluation.k if recipe is not None else None)
    base = Path(out) if out is not None else source.folder / "export"
    folders = [base / engine.name for engine in chosen]
    for folder in folders:
        _check_place(folder, overwrite)
    target = _target_name(ir)
    layouts = [
        engine.complete(ir, engine.layout(ir), folder, target, k)
        for engine, folder in zip(chosen, folders, strict=True)
    ]
    require_free_space(base, len(chosen) * ir.nbytes + (1 << 20))
    evidence = source.evidence(ir)
    expected = forecast(evidence.rows, evidence.in_training, k)
    passed_over = [f"eval/{name} is of another draft of this run: measure again" for name in evidence.outdated]
    written = []
    for engine, folder, layout in zip(chosen, folders, layouts, strict=True):
        command = engine.command(ir, folder, target, k)
        texts = {**layout.files, CARD: model_card(ir, engine, layout, command, evidence, source.text, expected)}
        _write_folder(folder, engine, ir, layout, sidecar(ir, engine, expected), texts, overwrite)
        for note in layout.notes:
            _log.info("%s: %s", engine.name, note)
        notes = [*layout.notes, *passed_over]
        written.append(Exported(engine.name, folder, notes, command, ir.nbytes, expected))
    return written


@dataclass(frozen=True)
class _Source:
    """Where a draft comes from.

    Attributes:
        draft: its folder.
        folder: of the run; the draft's own where there is none around it.
        recipe: the run's, where it is there; text: the same as it stands on disk.
    """

    draft: Path
    folder: Path
    recipe: Recipe | None
    text: str | None

    @staticmethod
    def of(run: str | Path) -> _Source:
        draft = find_draft(run)
        alone = draft == Path(run) and not (draft.parent / RESOLVED).exists()
        folder = draft if alone else draft.parent
        if not (folder / RESOLVED).exists():
            return _Source(draft, folder, None, None)
        return _Source(draft, folder, load_recipe(folder), (folder / RESOLVED).read_text(encoding="utf-8"))

    def evidence(self, ir: DraftIR) -> Evidence:
        return Evidence.of(self.folder, ir.provenance, weights_sha256(self.draft))


def _write_folder(
    folder: Path,
    engine: Engine,
    ir: DraftIR,
    layout: Layout,
    about: Mapping[str, Any],
    texts: Mapping[str, str],
    overwrite: bool,
) -> None:
    """One export, whole or not at all."""
    write = engine.write or _write_checkpoint
    try:
        with atomic_folder(folder, replace=overwrite) as partial:
            write(partial, ir, layout, folder)
            write_json(partial / SIDECAR, about)
            for name, text in texts.items():
                (partial / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot be written: {error.strerror or error}",
            where=folder,
            remedy="free some space, or give another place by --out",
        ) from None


def _check_place(folder: Path, overwrite: bool) -> None:
    """Refuse what must not be replaced."""
    if not folder.exists():
        return
    if not overwrite:
        raise ExportError("already exists", where=folder, remedy="give another --out, or --overwrite to replace it")
    if folder.is_symlink() or not folder.is_dir() or read_sidecar(folder) is None:
        raise ExportError(
            f"is no folder that `drafttrain export` wrote (it holds no {SIDECAR}): not replaced",
            where=folder,
            remedy="give another --out, or remove it yourself",
        )


def _engine(text: str) -> Engine:
    """By name, or by `name@version`."""
    name, _, version = text.partition("@")
    if name not in ENGINES:
        raise ExportError(f"no engine {name!r}", where="--to", remedy=f"known are {', '.join(ENGINES)}")
    engine = ENGINES[name]
    known = _NUMBER.findall(engine.versions)
    if version and not any(version == number or version.startswith(f"{number}.") for number in known):
        raise ExportError(
            f"{text}: what it loads is not known, the folder is written for {engine.versions}",
            where="--to",
            remedy=f"say --to {name}, and prove the export in your server before you rely on it",
        )
    return engine


def draft_tokens(ir: DraftIR, asked: int | None, measured_with: int | None) -> int:
    """Draft tokens a round: as asked, as measured, or four; never more than there are Medusa heads.

    Raises:
        ExportError: more were asked for than there are Medusa heads.
    """
    if ir.family == "medusa":
        if asked is not None and asked > ir.heads:
            raise ExportError(
                f"{asked} draft tokens a round need as many Medusa heads, this draft has {ir.heads}",
                where="--k",
                remedy=f"give at most {ir.heads}",
            )
        return min(asked or measured_with or ir.heads, ir.heads)
    return asked or measured_with or 4


def _target_name(ir: DraftIR) -> str:
    name = str(ir.target.get("name", "TARGET"))
    return str(embedded.converted_folder()) if name == embedded.NAME else name


def _write_checkpoint(folder: Path, ir: DraftIR, layout: Layout, shown: Path) -> None:
    write_safetensors(folder / WEIGHTS, layout.tensors)
    write_json(folder / CONFIG, layout.config)
    verify_export(folder, ir, layout, shown=shown)
