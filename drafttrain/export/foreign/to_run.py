"""A draft made elsewhere as a run's folder, which evaluation, further training and export accept."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from drafttrain.corpus.config import AnswersConfig, DataConfig, PromptSource
from drafttrain.errors import UserError
from drafttrain.export.foreign.read import ForeignDraft
from drafttrain.export.rebuild import config_of, save_ir
from drafttrain.files import atomic_folder, require_free_space
from drafttrain.losses.config import LossConfig
from drafttrain.recipe.load import save_recipe
from drafttrain.recipe.provenance import collect_provenance, record_provenance
from drafttrain.recipe.schema import REFERENCES, Recipe
from drafttrain.recipe.training_config import EvaluationConfig, TrainingConfig
from drafttrain.targets.config import TargetConfig

DRAFT = "draft"
_ODD = re.compile(r"[^A-Za-z0-9._-]+")
_PROMPTS = 1024


@dataclass(frozen=True)
class ImportedRun:
    """What was written.

    Attributes:
        folder: the run.
        recipe: it evaluates with the draft's target, and would train the draft further into `<folder>-tuned`.
    """

    folder: Path
    recipe: Recipe


def write_run(foreign: ForeignDraft, target: TargetConfig, folder: str | Path) -> ImportedRun:
    """Write the draft, a recipe that trains it further, and where it came from.

    Args:
        target: what the draft is for; evaluated in the draft's own dtype.
        folder: must not exist.

    Raises:
        UserError: the folder exists, or cannot be written.
    """
    final = Path(folder)
    check_new(final)
    ir = foreign.ir
    require_free_space(final, ir.nbytes + (1 << 20))
    recipe = _recipe(foreign, target, final)
    ir = replace(ir, provenance={**collect_provenance(ir.target), **ir.provenance, "recipe": recipe.name})
    with atomic_folder(final) as partial:
        save_ir(partial / DRAFT, ir)
        save_recipe(recipe, partial)
        record_provenance(partial, ir.provenance)
    return ImportedRun(final, recipe)


def check_new(folder: Path) -> None:
    """Refuse a folder that exists."""
    if folder.exists():
        raise UserError("already exists", where=folder, remedy="give another --out, or remove this folder")


def _recipe(foreign: ForeignDraft, target: TargetConfig, folder: Path) -> Recipe:
    ir = foreign.ir
    dtype = str(ir.dtype).removeprefix("torch.")
    if dtype in get_args(TargetConfig.model_fields["dtype"].annotation):
        target = TargetConfig.model_validate({**target.model_dump(), "dtype": dtype})
    drafter = config_of(ir).model_copy(update={"warm_start": str(folder / DRAFT)})
    heads = ir.heads if ir.family == "medusa" else EvaluationConfig().k
    return Recipe(
        name=_name(folder),
        output_dir=f"{folder}-tuned",
        target=target,
        data=DataConfig(prompts=(PromptSource(source="self", count=_PROMPTS),), answers=AnswersConfig()),
        drafter=drafter,
        loss=LossConfig(),
        training=TrainingConfig(epochs=1),
        evaluation=EvaluationConfig(k=min(heads, EvaluationConfig().k)),
    )


def _name(folder: Path) -> str:
    name = _ODD.sub("-", folder.resolve().name).strip("-._") or "draft"
    return f"imported-{name}" if name in REFERENCES else name
