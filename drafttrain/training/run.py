"""A whole run: recipe -> parts -> training -> saved drafts in the run's folder."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from rich.console import Console

from drafttrain.drafters.saving import save_draft
from drafttrain.errors import RecipeError
from drafttrain.features.lock import Part
from drafttrain.features.sources import FeatureSource
from drafttrain.files import exclusive
from drafttrain.recipe.build import RunParts, build_run, open_features, write_features
from drafttrain.recipe.load import save_recipe
from drafttrain.recipe.provenance import collect_provenance, record_provenance
from drafttrain.recipe.schema import Recipe
from drafttrain.training.acceptance import EngineMeasurement
from drafttrain.training.callbacks import Listener, WandbTracker, require_tracker
from drafttrain.training.checkpoint import set_aside
from drafttrain.training.distributed import make_accelerator
from drafttrain.training.metrics import MetricsLog
from drafttrain.training.progress import ConsoleReporter, ProgressLine
from drafttrain.training.trainer import Resume, Trainer, TrainParts, TrainResult

LOCK = ".lock"
FINAL, BEST = "draft", "best"
"""Folders of a run: the draft after the last step, and the one with the longest acceptance measured."""


def train_recipe(recipe: Recipe, resume: Resume, console: Console) -> TrainResult:
    """Train what a recipe says, in its run folder.

    Args:
        recipe: validated.
        resume: "auto" goes on from the newest whole checkpoint, "never" sets an earlier run aside, a path names one.
        console: for the main rank's messages.

    Raises:
        UserError: see `build_run` and `Trainer.fit`.
    """
    require_tracker(recipe.tracking)
    if recipe.training.num_threads is not None:
        torch.set_num_threads(recipe.training.num_threads)
    accelerator = make_accelerator()
    folder = Path(recipe.run_folder)
    # Two runs in one folder would remove each other's half-written shards and checkpoints.
    alone = exclusive(folder / LOCK, "training into this folder") if accelerator.is_main_process else nullcontext()
    with alone:
        return _train(recipe, resume, console, accelerator)


def _train(recipe: Recipe, resume: Resume, console: Console, accelerator: Accelerator) -> TrainResult:
    report = ConsoleReporter(console, quiet=not accelerator.is_main_process)
    # The main rank writes the data, and the others then find it.
    with accelerator.main_process_first():
        parts = build_run(recipe, report)
    # Features they write together.
    part = Part(accelerator.process_index, accelerator.num_processes)
    write_features(recipe, parts, report, part)
    accelerator.wait_for_everyone()
    with closing(open_features(recipe, parts, report, part)) as source:
        return _fit(recipe, resume, console, accelerator, parts, source, report)


def _fit(
    recipe: Recipe,
    resume: Resume,
    console: Console,
    accelerator: Accelerator,
    parts: RunParts,
    source: FeatureSource,
    report: ConsoleReporter,
) -> TrainResult:
    main = accelerator.is_main_process
    folder = Path(recipe.run_folder)
    provenance = collect_provenance(parts.target.identity.to_dict(), parts.data)
    trainer = Trainer(
        accelerator,
        recipe.training,
        TrainParts(parts.drafter, parts.objective, source, parts.corpus.samples, parts.target.head()),
        folder,
        seed=recipe.training_seed,
        fingerprint=parts.fingerprint(),
        warn=report.say,
    )
    trainer.restore(resume)
    listeners: list[Listener] = []
    if main:
        folder.mkdir(parents=True, exist_ok=True)
        save_recipe(recipe, folder)
        record_provenance(folder, provenance)
        if resume == "never":
            set_aside(folder / "metrics.jsonl")
        listeners = _listeners(recipe, folder, trainer, console)
        if trainer.state.step:
            report.say(f"resuming after step {trainer.state.step}")
        report.say(
            f"training {trainer.total_steps} steps on {accelerator.num_processes} process(es), {accelerator.device}"
        )

    def save(name: str) -> None:
        save_draft(
            folder / name,
            trainer.drafter,
            target=parts.target.identity.to_dict(),
            provenance={
                **provenance,
                "recipe": recipe.name,
                "step": trainer.state.step,
                "coverage": parts.coverage,
            },
            replace=True,
        )

    result = trainer.fit(
        listeners,
        measure=_measurement(recipe, parts),
        measure_every=recipe.evaluation.every,
        on_best=lambda: save(BEST),
    )
    if main and result.finished:
        save(FINAL)
        if not (folder / BEST).exists():
            save(BEST)  # nothing was measured: the last draft is the best one known
        report.say(f"the draft is in {folder / FINAL}")
    accelerator.wait_for_everyone()
    return result


def resume_from(value: str) -> Resume:
    """The command line's form: auto, never, or a checkpoint folder.

    Raises:
        RecipeError: a path that does not exist.
    """
    if value == "auto":
        return "auto"
    if value == "never":
        return "never"
    path = Path(value).expanduser()
    if not path.is_dir():
        raise RecipeError("no such checkpoint folder", where=path, remedy="--resume takes auto, never or a folder")
    return path


def _listeners(recipe: Recipe, folder: Path, trainer: Trainer, console: Console) -> list[Listener]:
    found: list[Listener] = [
        MetricsLog(folder / "metrics.jsonl", trainer.state.step),
        ProgressLine(console, trainer.total_steps, trainer.state.step),
    ]
    if recipe.tracking.wandb != "off":
        found.append(WandbTracker(recipe.tracking, recipe.name, folder, recipe.model_dump(mode="json")))
    return found


def _measurement(recipe: Recipe, parts: RunParts) -> EngineMeasurement | None:
    if not parts.held_out:
        return None
    return EngineMeasurement(parts.target, parts.drafter, parts.held_out, recipe.evaluation, parts.stop_ids)
