"""A whole run: recipe -> parts -> training -> saved drafts in the run's folder."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from rich.console import Console

from drafttrain.drafters.saving import save_draft
from drafttrain.errors import AlreadyReported, RecipeError, UserError
from drafttrain.features.lock import Part
from drafttrain.features.sources import FeatureSource
from drafttrain.files import exclusive
from drafttrain.modeling.compiled import require_compiler
from drafttrain.recipe.build import RunParts, build_run, open_features, store_path, write_features
from drafttrain.recipe.history import Change, changes, check_changes, earlier_name, keep_recipe
from drafttrain.recipe.provenance import collect_provenance, record_provenance, versions
from drafttrain.recipe.schema import CHECKPOINTS, RESOLVED, Recipe
from drafttrain.recipe.servers import check_servers
from drafttrain.recipe.settle import settle
from drafttrain.targets.ends import load_ends
from drafttrain.targets.load import load_target, resolve_device
from drafttrain.training.acceptance import EngineMeasurement
from drafttrain.training.adapter import ADAPTER, require_peft, save_adapter
from drafttrain.training.ahead import batches_ahead
from drafttrain.training.callbacks import Listener, WandbTracker, require_tracker, tracker_id
from drafttrain.training.checkpoint import has_checkpoints, require_same_run, set_aside
from drafttrain.training.distributed import from_main, make_accelerator
from drafttrain.training.heartbeat import Heartbeat
from drafttrain.training.launch import Launch, check_against_recipe, requested
from drafttrain.training.metrics import MetricsLog
from drafttrain.training.progress import ConsoleReporter, ProgressLine
from drafttrain.training.ranks import Ranks
from drafttrain.training.sharded_target import ShardedTarget, TogetherFeatures, load_sharded_target
from drafttrain.training.strategies.base import Whole
from drafttrain.training.trainer import Resume, Trainer, TrainParts, TrainResult, order_of

LOCK, METRICS = ".lock", "metrics.jsonl"
FINAL, BEST = "draft", "best"
"""Folders of a run: the draft after the last step, and the one with the longest acceptance measured."""


@dataclass(frozen=True)
class _Run:
    """What all stages of a run share.

    Attributes:
        recipe, resume, console: as `train_recipe` got them.
        launch: what the launcher asked for.
        accelerator, ranks: the processes.
        life: tells the other ranks where this one stands.
        report: says what is done, on the main rank.
    """

    recipe: Recipe
    resume: Resume
    console: Console
    launch: Launch
    accelerator: Accelerator
    ranks: Ranks
    life: Heartbeat
    report: ConsoleReporter

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        return Path(self.recipe.run_folder)


def train_recipe(recipe: Recipe, resume: Resume, console: Console) -> TrainResult:
    """Train what a recipe says, in its run folder.

    Args:
        recipe: validated.
        resume: "auto" goes on from the newest whole checkpoint, "never" sets an earlier run aside, a path names one.
        console: for the main rank's messages.

    Raises:
        UserError: see `build_run` and `Trainer.fit`.
    """
    recipe = settle(recipe)
    require_tracker(recipe.tracking)
    require_peft(recipe.drafter.lora)
    launch = requested()
    check_against_recipe(launch, recipe)
    if recipe.training.num_threads is not None:
        torch.set_num_threads(recipe.training.num_threads)
    accelerator = make_accelerator(launch, recipe.training.clip_norm)
    ranks = Ranks(accelerator)
    if recipe.training.compile:
        # Models that the engine compiles, too, ask for it themselves; here it is asked before hours of data.
        ranks.together(lambda: require_compiler(accelerator.device))
    ranks.together(lambda: _require_one_device(recipe, accelerator.device))
    ranks.together(lambda: _require_base_elsewhere(recipe))
    ranks.agree("the recipe", recipe.model_dump(mode="json"), "start every rank with the same recipe and overrides")
    ranks.agree("the software", versions(), "install the same versions on every host")
    folder = Path(recipe.run_folder)
    with ExitStack() as held:
        # Two runs in one folder would remove each other's half-written shards and checkpoints.
        lock = exclusive(folder / LOCK, "training into this folder") if ranks.main else nullcontext()
        ranks.together(lambda: held.enter_context(lock))
        life = Heartbeat(
            folder,
            from_main(uuid.uuid4().hex),
            ranks.rank,
            ranks.count,
            patience_s=recipe.training.patience_s,
            tell=lambda message: Console(stderr=True, soft_wrap=True).print(f"error: {message}", style="red"),
        )
        held.enter_context(life)
        held.enter_context(_blaming(ranks, life))
        report = ConsoleReporter(console, quiet=not ranks.main)
        return _train(_Run(recipe, resume, console, launch, accelerator, ranks, life, report))


def _train(run: _Run) -> TrainResult:
    recipe, ranks, report = run.recipe, run.ranks, run.report
    order = order_of(recipe.training, recipe.training_seed)
    _refuse_another_run(run, order)
    ranks.together(lambda: check_servers(recipe, store_path(recipe)))
    parts = _build(run)
    ranks.agree(
        "the data",
        {**parts.fingerprint(), "samples": len(parts.corpus.samples), "files": parts.data},
        "the run's folder and the data must be the same files on every host (a shared disk)",
    )
    known = {**parts.fingerprint(), **order, "samples": len(parts.corpus.samples)}
    _refuse_another_run(run, known)
    # Features they write together.
    part = Part(ranks.rank, ranks.count)
    ranks.together(lambda: write_features(recipe, parts, report, part))
    with closing(ranks.together(lambda: open_features(recipe, parts, report, part))) as source:
        return _fit(run, parts, source)


def _require_one_device(recipe: Recipe, device: torch.device) -> None:
    """A draft reads the target's embedding and head where it is trained: what is elsewhere fails in the first step.

    Raises:
        RecipeError: naming both devices.
    """
    target, here = resolve_device(recipe.target.device), resolve_device(str(device))
    if target != here:
        raise RecipeError(
            f"is {recipe.target.device}, which is {target} here, and this process trains on {here}",
            where="target.device",
            remedy="leave it at auto, and choose GPUs with CUDA_VISIBLE_DEVICES; to train on a CPU beside a GPU, both: "
            "target.device=cpu and --config_file recipes/accelerate/cpu.yaml",
        )


def _require_base_elsewhere(recipe: Recipe) -> None:
    """Refuse adapters on a draft that the run itself will replace: a run that goes on would add them to another one.

    Raises:
        RecipeError: naming that draft.
    """
    start = recipe.drafter.warm_start
    if recipe.drafter.lora is None or start is None:
        return
    if Path(start).resolve() in (Path(recipe.run_folder, name).resolve() for name in (BEST, FINAL)):
        raise RecipeError(
            f"{start} is a draft of this very run, which replaces it, and adapters need what they were trained on",
            where="drafter.warm_start",
            remedy="copy that folder and start from the copy, or choose another output_dir",
        )


def _refuse_another_run(run: _Run, known: dict[str, Any]) -> None:
    """Answers and features take hours: a folder that holds another run is refused before them."""
    if run.resume == "never":
        return
    checkpoints = run.folder / CHECKPOINTS if run.resume == "auto" else run.resume
    run.ranks.together(lambda: require_same_run(checkpoints, known))


def _fit(run: _Run, parts: RunParts, source: FeatureSource) -> TrainResult:
    recipe, ranks, folder = run.recipe, run.ranks, run.folder
    trainer = ranks.together(lambda: _trainer(run, parts, source))
    ranks.together(lambda: trainer.restore(run.resume))
    changed = {} if run.resume == "never" else ranks.together(lambda: changes(folder, recipe))
    step, measured = trainer.state.step, trainer.state.best_step is not None
    ranks.together(lambda: check_changes(folder, changed, step, trainer.total_steps, measured))
    provenance = {**collect_provenance(parts.target.identity.to_dict(), parts.data), "sharding": run.launch.name}
    run.life.at(step, 0, "starting to train")
    listeners = _open_folder(run, trainer, changed, provenance) if ranks.main else []
    drafts = _Drafts(run, parts, trainer, provenance)
    with _named_by_rank(run.life):
        result = trainer.fit(
            listeners,
            measure=_measurement(recipe, parts),
            measure_every=recipe.evaluation.every,
            on_best=lambda whole: drafts.save(BEST, whole),
        )
    if not result.finished:
        run.report.say(f"stopped and saved after step {result.state.step}; the same command goes on from there")
    whole = trainer.strategy.whole(ranks.main) if result.finished else None
    if whole is not None:
        drafts.save(FINAL, whole)
        # Where nothing was measured the last draft is the best one known, also of a run that goes on.
        if result.state.best_step is None or not (folder / BEST).exists():
            drafts.save(BEST, whole)
        run.report.say(f"the draft is in {folder / FINAL}")
    run.accelerator.wait_for_everyone()
    return result


def _trainer(run: _Run, parts: RunParts, source: FeatureSource) -> Trainer:
    recipe, in_shards = run.recipe, isinstance(parts.target, ShardedTarget)
    if isinstance(parts.target, ShardedTarget):
        source = TogetherFeatures(source, parts.target)
    ahead = batches_ahead(recipe, run.accelerator.device.type == "cpu")
    return Trainer(
        run.accelerator,
        recipe.training,
        TrainParts(parts.drafter, parts.objective, source, parts.corpus.samples, parts.target.head(), in_shards, ahead),
        run.folder,
        seed=recipe.training_seed,
        fingerprint=parts.fingerprint(),
        launch=run.launch,
        life=run.life,
        warn=run.report.say,
    )


def _open_folder(
    run: _Run, trainer: Trainer, changed: Mapping[str, Change], provenance: Mapping[str, Any]
) -> list[Listener]:
    """Leave in the run's folder what this launch is, and say it; what is to get its records."""
    recipe, folder, report, step = run.recipe, run.folder, run.report, trainer.state.step
    folder.mkdir(parents=True, exist_ok=True)
    if run.resume == "never":
        begin_anew(folder, recipe.drafter.warm_start)
    said = keep_recipe(recipe, folder, step, changed)
    if said is not None:
        report.say(said)
    record_provenance(folder, provenance)
    if step:
        report.say(f"resuming after step {step}")
    report.say(
        f"training {trainer.total_steps} steps on {run.ranks.count} process(es), {run.accelerator.device}, "
        f"{trainer.strategy.name}" + (f", {trainer.ahead} micro-batches ahead" if trainer.ahead else "")
    )
    return _listeners(recipe, folder, trainer, run.console)


@dataclass(frozen=True)
class _Drafts:
    """Saves drafts of a run.

    Attributes:
        provenance: of this launch.
    """

    run: _Run
    parts: RunParts
    trainer: Trainer
    provenance: dict[str, Any]

    def save(self, name: str, whole: Whole) -> None:
        """The draft as it stands, and its adapters, in the place of the one that the folder `name` has."""
        recipe, parts, folder = self.run.recipe, self.parts, self.run.folder
        if recipe.drafter.lora is not None:
            place = folder / f"{name}-{ADAPTER}"
            save_adapter(place, parts.drafter, recipe.drafter.lora, whole.adapter, _base(recipe))
        save_draft(
            folder / name,
            whole.drafter,
            target=parts.target.identity.to_dict(),
            provenance={
                **self.provenance,
                "recipe": recipe.name,
                "step": self.trainer.state.step,
                "coverage": parts.coverage,
                "held_out_coverage": parts.held_out_coverage,
            },
            replace=True,
        )


def begin_anew(folder: Path, start: str | None = None) -> None:
    """Set aside what an earlier run left beside its checkpoints: a draft of its own would be taken for this run's.

    Args:
        start: the draft that this run starts from, which stays.
    """
    drafts = [folder / f"{name}{end}" for name in (BEST, FINAL) for end in ("", f"-{ADAPTER}")]
    for path in (folder / RESOLVED, folder / METRICS, *folder.glob(earlier_name("*")), *drafts):
        if start is None or path.resolve() != Path(start).resolve():
            set_aside(path)


def _base(recipe: Recipe) -> str:
    """What a draft's adapters were trained on."""
    drafter = recipe.drafter
    return drafter.warm_start or getattr(drafter, "checkpoint", None) or recipe.target.model


def _build(run: _Run) -> RunParts:
    recipe, ranks, report = run.recipe, run.ranks, run.report
    # An answer more would make it another run.
    settled = not ranks.main or (run.resume != "never" and has_checkpoints(run.folder / CHECKPOINTS))
    if recipe.target.placement != "zero3":
        load = load_target if recipe.target.placement == "whole" else load_ends
        # The main rank writes the data; the others then find it.
        return ranks.main_first(lambda: build_run(recipe, report, load, settled=settled))
    # Loading in shards and copying from them is done by all ranks at once.
    return ranks.together(lambda: build_run(recipe, report, load_sharded_target, ranks.main_first, settled=settled))


@contextmanager
def _named_by_rank(life: Heartbeat) -> Iterator[None]:
    """Have an error that one rank runs into while it trains say which."""
    try:
        yield
    except UserError as error:
        if life.count == 1 or isinstance(error, AlreadyReported):
            raise
        where = ": ".join(part for part in (life.life.name, error.where) if part)
        raise UserError(error.what, where=where, remedy=error.remedy) from error


@contextmanager
def _blaming(ranks: Ranks, life: Heartbeat) -> Iterator[None]:
    """Where a collective breaks off, let the rank speak that is to blame, and end."""
    try:
        yield
    except RuntimeError as error:
        if ranks.count > 1 and _broke_off(error):
            life.peer_failed()
        raise


def _broke_off(error: RuntimeError) -> bool:
    """Whether another rank is missing: torch gives gloo's errors no type of their own."""
    return isinstance(error, dist.DistError) or any(
        word in str(error) for word in ("Connection closed by peer", "Connection reset by peer", "gloo", "NCCL")
    )


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
        MetricsLog(folder / METRICS, trainer.state.step),
        ProgressLine(console, trainer.total_steps, trainer.state.step),
    ]
    if recipe.tracking.wandb != "off":
        known_as = tracker_id(folder, recipe.name, resumed=trainer.state.step > 0)
        found.append(WandbTracker(recipe.tracking, recipe.name, known_as, folder, recipe.model_dump(mode="json")))
    return found


def _measurement(recipe: Recipe, parts: RunParts) -> EngineMeasurement | None:
    if not parts.held_out:
        return None
    return EngineMeasurement(parts.target, parts.held_out, recipe.evaluation, parts.stop_ids)
