"""The plan of a recipe: parameters, operations, disk, memory, hours. Models are built on the meta device only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.build import build_drafter
from drafttrain.drafters.lm.hf import new_model
from drafttrain.errors import RecipeError, TargetError
from drafttrain.features.sources import taps_with_final
from drafttrain.features.store import StoreIdentity
from drafttrain.recipe.schema import Recipe
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import load_text_config
from drafttrain.training.plan.flops import StepFlops, step_flops
from drafttrain.training.plan.hardware import Hardware
from drafttrain.training.plan.memory import Item, memory_items, peak
from drafttrain.training.plan.workload import Workload, workload


@dataclass(frozen=True)
class Plan:
    """What a recipe will take.

    Attributes:
        target_parameters, draft_parameters, trained_parameters: exact.
        work: samples, tokens, steps.
        flops: of one sample in one epoch.
        store_bytes: of the feature store over all training tokens; store_token_bytes: of one token.
        online: whether features are computed while training, so that no store is written.
        memory: of one rank.
        target_hours, draft_hours: on the hardware, at its assumed use; without prompts, answers, measuring.
        changes: overrides that make it fit, None when none does, () when it fits as it is.
    """

    recipe: Recipe
    hardware: Hardware
    target_parameters: int
    draft_parameters: int
    trained_parameters: int
    work: Workload
    flops: StepFlops
    store_bytes: int
    store_token_bytes: int
    online: bool
    memory: list[Item]
    target_hours: float
    draft_hours: float
    changes: tuple[str, ...] | None

    @property
    def memory_bytes(self) -> int:
        """At the peak of one rank, without what is reserved."""
        return peak(self.memory)

    @property
    def fits(self) -> bool:
        """Whether one rank's memory suffices."""
        return _fits(self.memory, self.hardware)


def target_config(recipe: Recipe, path: str | Path | None = None) -> Any:
    """The target's text config, from a file where the target cannot be reached.

    Raises:
        TargetError: neither can be read.
    """
    source = recipe.target
    if path is not None:
        folder = Path(path).expanduser()
        if not folder.exists():
            raise TargetError("no such file", where=path, remedy="--target-config takes the target's config.json")
        source = TargetConfig(model=str(folder.parent if folder.is_file() else folder))
        if folder.is_file() and folder.name != "config.json":
            raise TargetError("is not called config.json", where=path, remedy="give it that name, as checkpoints do")
    try:
        return load_text_config(source)
    except TargetError as error:
        if path is not None:
            raise
        raise TargetError(
            error.what, where=error.where, remedy="pass the target's config: --target-config path/to/config.json"
        ) from None


def make_plan(
    recipe: Recipe, text: Any, hardware: Hardware, *, samples: int | None = None, tokens: int | None = None
) -> Plan:
    """Plan a run. No weights are loaded or allocated.

    Args:
        text: the target's Hugging Face text config.
        samples, tokens: training samples and their mean length, where the user knows better.

    Raises:
        RecipeError: a draft that does not fit the target.
    """
    target = new_model(text, "meta")
    try:
        drafter = build_drafter(recipe.drafter, text, device="meta")
    except ValueError as error:
        raise RecipeError(str(error), where="drafter") from None
    work = workload(recipe, hardware.ranks, samples, tokens)
    flops = step_flops(drafter, target, recipe.loss, work, recipe.training.gradient_checkpointing)
    online = not recipe.features.stores
    token_bytes = _store_identity(recipe, drafter, text).bytes_per_token
    # A store is filled once; online features are computed in each epoch.
    body_runs = work.seen if online else work.samples
    target_flops = flops.target.head * work.seen + (flops.target.total - flops.target.head) * body_runs
    target_flops += flops.first_time.total * work.samples
    memory = memory_items(recipe, drafter, target, hardware.ranks, hardware.is_cpu)
    target_rate = hardware.peak(recipe.target.dtype) * hardware.target_use * hardware.ranks
    draft_rate = hardware.peak(recipe.training.precision) * hardware.draft_use * hardware.ranks
    return Plan(
        recipe=recipe,
        hardware=hardware,
        target_parameters=sum(p.numel() for p in target.parameters()),
        draft_parameters=sum(p.numel() for p in drafter.parameters()),
        trained_parameters=sum(p.numel() for p in drafter.parameters() if p.requires_grad),
        work=work,
        flops=flops,
        store_bytes=token_bytes * work.tokens,
        store_token_bytes=token_bytes,
        online=online,
        memory=memory,
        target_hours=target_flops / target_rate / 3600,
        draft_hours=flops.draft * work.seen / draft_rate / 3600,
        changes=() if _fits(memory, hardware) else _what_would_fit(recipe, drafter, target, hardware),
    )


def _store_identity(recipe: Recipe, drafter: Drafter, text: Any) -> StoreIdentity:
    return StoreIdentity(
        target=recipe.target.model,
        weights_hash="",
        tokenizer_hash="",
        template_hash="",
        taps=tuple(str(tap) for tap in taps_with_final(drafter.feature_spec)),
        hidden_size=text.hidden_size,
        dtype=recipe.features.dtype,
        compute_dtype=recipe.target.dtype,
    )


def _fits(memory: list[Item], hardware: Hardware) -> bool:
    return peak(memory) + hardware.reserved <= hardware.memory


def _what_would_fit(recipe: Recipe, drafter: Drafter, target: Any, hardware: Hardware) -> tuple[str, ...] | None:
    """The first single change that suffices, else the fewest in that order together, else None."""

    def fits(changed: Recipe) -> bool:
        return _fits(memory_items(changed, drafter, target, hardware.ranks, hardware.is_cpu), hardware)

    for name, changed in _changes(recipe):
        if fits(changed):
            return (name,)
    names: list[str] = []
    while (step := next(_changes(recipe), None)) is not None:
        names.append(step[0])
        recipe = step[1]
        if fits(recipe):
            return tuple(names)
    return None


def _changes(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Overrides that save memory and hardly cost quality, in the order in which to try them; each once."""
    training = recipe.training
    if not training.gradient_checkpointing and recipe.drafter.family != "medusa":
        yield "training.gradient_checkpointing=true", _with_training(recipe, gradient_checkpointing=True)
    if training.batch_rows > 1:
        rows = training.batch_rows * training.accumulation
        changed = _with_training(recipe, batch_rows=1, accumulation=rows)
        yield f"training.batch_rows=1 training.accumulation={rows}", changed
    if training.packing and training.row_length > recipe.data.max_length:
        length = recipe.data.max_length
        yield f"training.row_length={length}", _with_training(recipe, row_length=length)
    if recipe.evaluation.prompts and recipe.evaluation.batch_size > 1:
        evaluation = recipe.evaluation.model_copy(update={"batch_size": 1})
        yield "evaluation.batch_size=1", recipe.model_copy(update={"evaluation": evaluation})
    if training.precision == "fp32":
        yield "training.precision=bf16", _with_training(recipe, precision="bf16")
    if recipe.target.dtype == "float32":
        target = recipe.target.model_copy(update={"dtype": "bfloat16"})
        yield "target.dtype=bfloat16", recipe.model_copy(update={"target": target})


def _with_training(recipe: Recipe, **changes: Any) -> Recipe:
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=changes)})
