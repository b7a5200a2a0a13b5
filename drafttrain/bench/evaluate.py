"""From a run's folder to a result: load target and draft, run the suite, write everything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drafttrain.bench.contenders import Contenders, files_used
from drafttrain.bench.cost_model import cost_models
from drafttrain.bench.journal import UNFINISHED, Journal
from drafttrain.bench.leaderboard import rows_of, write_rows
from drafttrain.bench.prompts import EvalPrompt
from drafttrain.bench.report.html import render_html
from drafttrain.bench.result import EvalResult
from drafttrain.bench.runner import Progress, SuiteRun, run_suite
from drafttrain.bench.suite import SuiteConfig
from drafttrain.bench.tables import tables
from drafttrain.bench.training_cost import TrainingCost, training_cost
from drafttrain.drafters.saving import META, WEIGHTS, find_draft, read_meta
from drafttrain.errors import RecipeError
from drafttrain.files import atomic_file, settled, sha256_file, sha256_text, write_json
from drafttrain.recipe.load import load_recipe
from drafttrain.recipe.provenance import cpu_text, git_revision, hardware, versions
from drafttrain.recipe.schema import Recipe
from drafttrain.targets import embedded
from drafttrain.targets.load import load_target
from drafttrain.targets.model import TargetModel

_TARGET = "target."


@dataclass(frozen=True)
class Written:
    """Paths of what `write_result` wrote."""

    result: Path
    report: Path
    records: Path
    rows: Path


@dataclass(frozen=True)
class _UnderTest:
    """The draft of the run.

    Attributes:
        folder: where it is saved.
        family: its family.
        files: name -> SHA-256 of what it is read from.
    """

    folder: Path
    family: str
    files: dict[str, str]

    @staticmethod
    def of(run: str | Path) -> _UnderTest:
        """Of a run. Raises CheckpointError where it has none."""
        folder = find_draft(run)
        files = {name: sha256_file(settled(folder) / name) for name in (WEIGHTS, META)}
        return _UnderTest(folder, read_meta(folder).family, files)


def evaluate(
    run: str | Path,
    suite: SuiteConfig,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
    folder: Path | None = None,
    fresh: bool = False,
    say: Callable[[str], None] | None = None,
) -> tuple[EvalResult, SuiteRun]:
    """Run a suite.

    Args:
        run: a run's folder; a recipe will do where the suite's `drafts` do not include "run".
        suite: what to run.
        overrides: `target.key=value` of the recipe, such as `target.dtype=bfloat16`.
        progress: told what is running.
        folder: of the results; finished settings are kept there, and those of an interrupted evaluation like this
            one are not measured again.
        fresh: measure them again all the same.
        say: told what becomes of an interrupted evaluation.

    Raises:
        UserError: whatever is missing, foreign or does not fit, before anything is timed.
    """
    require_run(run, suite)
    recipe = load_recipe(run, overrides)
    prompts = suite.load_prompts()
    draft = _UnderTest.of(run) if suite.uses_run else None
    target = load_target(recipe.target)
    contenders = Contenders(target, suite, None if draft is None else (recipe.name, draft.folder)).all()
    journal = None
    if folder is not None:
        journal = Journal(folder / UNFINISHED, _key(recipe, suite, prompts, draft, target), fresh)
        if say is not None and journal.kept:
            say(f"going on with {len(journal.kept)} setting(s) that were measured before (--fresh measures them again)")
        if say is not None and journal.differs:
            say(f"what an interrupted eval left here is dropped: other {', '.join(journal.differs)}")
    # What may be damaged is read before anything is measured.
    training = training_cost(Path(run)) if draft is not None else None
    measured = run_suite(target, suite, prompts, contenders, progress, recipe.data.template_kwargs, journal)
    return _result(recipe, suite, prompts, draft, target, measured, training), measured


def require_run(run: str | Path, suite: SuiteConfig) -> None:
    """Refuse a YAML file in the place of a run, where the suite measures the run's draft."""
    if suite.uses_run and Path(run).suffix in (".yaml", ".yml") and not Path(run).is_dir():
        raise RecipeError(
            f"the drafts of suite {suite.name} include run, the draft of a trained run, and this is a file",
            where=run,
            remedy="give the run's folder in its place, or drafts that need none, such as drafts=[ngram]",
        )


def _key(
    recipe: Recipe, suite: SuiteConfig, prompts: Sequence[EvalPrompt], draft: _UnderTest | None, target: TargetModel
) -> dict[str, Any]:
    """All that a measurement depends on."""
    revision = git_revision()
    return {
        "suite": suite.model_dump(mode="json"),
        "prompts": sha256_text(json.dumps([asdict(prompt) for prompt in prompts])),
        "target": {
            **target.identity.to_dict(),
            "dtype": str(target.dtype),
            "device": str(target.device),
            "template_kwargs": recipe.data.template_kwargs,
        },
        "draft": None if draft is None else draft.files,
        "files": {str(path): sha256_file(path) for path in files_used(suite) if path.is_file()},
        "versions": {**versions(), "revision": revision and revision["commit"]},
        "hardware": hardware(),
    }


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """(those of the suite, those of the recipe's target)."""
    of_target = [text for text in overrides if text.startswith(_TARGET)]
    return [text for text in overrides if not text.startswith(_TARGET)], of_target


def write_result(result: EvalResult, run: SuiteRun, folder: Path) -> Written:
    """Write `result.json`, `report.html`, `records.jsonl` and the rows of a leaderboard into an existing folder, each
    whole or not at all."""
    records = folder / "records.jsonl"
    with atomic_file(records) as partial, partial.open("w", encoding="utf-8") as file:
        for (setting, draft), rounds in run.records.items():
            head = {"draft": draft, **asdict(setting)}
            for record in rounds:
                # A record's `batch` is the rows of its round, the setting's the most there may be.
                file.write(json.dumps({**head, "max_batch": setting.batch, **asdict(record)}) + "\n")
    models = [asdict(model) for model in cost_models(result)]
    derived = {"tables": asdict(tables(result)), "cost_models": models}
    write_json(folder / "result.json", {**result.to_json(), **derived})
    with atomic_file(folder / "report.html") as partial:
        partial.write_text(render_html(result), encoding="utf-8")
    write_json(folder / "leaderboard.json", [asdict(row) for row in rows_of(result)])
    shutil.rmtree(folder / UNFINISHED, ignore_errors=True)
    return Written(folder / "result.json", folder / "report.html", records, folder / "leaderboard.json")


def add_to_leaderboard(result: EvalResult, folder: Path) -> Path:
    """Write the rows of a result, replacing those of an earlier run of the same name, and render the page."""
    return write_rows(folder, f"{result.suite['name']}-{result.run or 'references'}", rows_of(result))


def _result(
    recipe: Recipe,
    suite: SuiteConfig,
    prompts: Sequence[EvalPrompt],
    draft: _UnderTest | None,
    target: TargetModel,
    measured: SuiteRun,
    training: TrainingCost | None,
) -> EvalResult:
    categories: dict[str, int] = {}
    for prompt in prompts:
        categories[prompt.category] = categories.get(prompt.category, 0) + 1
    revision = git_revision()
    return EvalResult(
        target=recipe.target.model,
        run="" if draft is None else recipe.name,
        recipe=recipe.name,
        family="" if draft is None else draft.family,
        weights="" if draft is None else draft.files[WEIGHTS],
        suite=suite.model_dump(mode="json"),
        prompts=len(prompts),
        categories=categories,
        drafts=measured.drafts,
        texts=measured.texts,
        hardware=_machine(target),
        device=target.device.type,
        versions=versions(),
        commit="" if revision is None else revision["commit"] + ("-dirty" if revision["dirty"] else ""),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=[*([embedded.DESCRIPTION] if recipe.target.model == embedded.NAME else []), *measured.notes],
        training=training,
    )


def _machine(target: TargetModel) -> str:
    """What decoded, and in which dtype."""
    found = hardware()
    where = cpu_text(found)
    if target.device.type == "cuda":
        where = found["gpus"][target.device.index or 0]
    return f"{where}, {str(target.dtype).removeprefix('torch.')}"
