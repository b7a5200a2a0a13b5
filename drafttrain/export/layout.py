"""What a writer makes of a draft, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from drafttrain.export.ir import DraftIR, ExportError


@dataclass(frozen=True)
class Layout:
    """A folder for one engine.

    Attributes:
        config: `config.json`.
        tensors: `model.safetensors`, under the engine's names.
        notes: what was converted or is worth knowing; logged and kept in the card.
        files: further text files by name.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


def as_it_is(ir: DraftIR, layout: Layout, folder: Path, target: str, k: int) -> Layout:
    """For engines whose folder says nothing of how it is served."""
    return layout


@dataclass(frozen=True)
class Engine:
    """A serving engine.

    Attributes:
        name: as `--to` takes it.
        versions: what the layout was taken from.
        layout: makes the folder's content; refuses what the engine cannot express.
        command: (draft, folder, target's name or path, draft tokens a round) -> the command that serves it.
        complete: adds to a layout what depends on those: (draft, layout, folder, target, draft tokens).
        write: writes config and weights into a folder and reads them back, (folder, draft, layout, its name in
            messages); None for config.json and model.safetensors.
    """

    name: str
    versions: str
    layout: Callable[[DraftIR], Layout]
    command: Callable[[DraftIR, Path, str, int], str]
    complete: Callable[[DraftIR, Layout, Path, str, int], Layout] = as_it_is
    write: Callable[[Path, DraftIR, Layout, Path], None] | None = None


def refuse(engine: str, option: str, why: str, remedy: str) -> ExportError:
    """The error for an option that an engine lacks."""
    return ExportError(f"{engine} cannot serve this draft: {option}: {why}", remedy=remedy)


def no_family(engine: str, family: str, why: str, instead: str) -> ExportError:
    """The error for a family that an engine lacks."""
    return refuse(engine, f"drafter.family {family}", why, f"export it --to {instead}")


def named_like(tensors: dict[str, Tensor], extra: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights and further tensors under one roof, sorted by name: the same draft gives the same bytes."""
    return dict(sorted({**tensors, **extra}.items()))
