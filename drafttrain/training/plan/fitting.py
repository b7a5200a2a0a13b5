"""What makes a recipe fit: another launch, a cheaper setting, another place for the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from drafttrain.recipe.schema import Recipe
from drafttrain.training.ahead import batches_ahead
from drafttrain.training.plan.layout import Layout, Placement, preferred

Fits = Callable[[Recipe, Layout], bool]
Changes = Callable[[Recipe], Iterator[tuple[str, Recipe]]]
"""Ways to change a recipe: the words of the overrides, and the recipe with them."""


@dataclass(frozen=True)
class Fitting:
    """A way in which a recipe fits.

    Attributes:
        layout: with its launch config.
        changes: overrides, each the words of one; none when the recipe fits as it stands.
    """

    layout: Layout
    changes: tuple[str, ...] = ()


def find_fitting(recipe: Recipe, ranks: int, fits: Fits, on_cpu: bool, context: int) -> Fitting | None:
    """The least that makes a recipe fit.

    First the plainest launch of the recipe as it stands; then, with the leanest launch, the first single setting that
    suffices, or the fewest in that order together; then the same with the target in shards, then with it elsewhere.

    Args:
        context: of the target, in tokens.
    """
    changes = partial(_changes, on_cpu=on_cpu, context=context)
    for name, changed in _placements(recipe, ranks):
        before = () if name is None else (name,)
        layouts = list(preferred(changed.target.placement, ranks))
        if not layouts:
            continue
        for layout in layouts:
            if fits(changed, layout):
                return Fitting(layout, before)
        found = _settings(changed, layouts[-1], fits, changes)
        if found:
            return Fitting(layouts[-1], (*before, *found))
    return None


def _placements(recipe: Recipe, ranks: int) -> Iterator[tuple[str | None, Recipe]]:
    """The recipe, then with its target in other places that take less memory of a rank."""
    yield None, recipe
    placement = recipe.target.placement
    if placement == "zero3" and ranks == 1:
        yield "target.placement=whole", _placed(recipe, "whole")
    if placement == "whole" and ranks > 1 and recipe.features.source == "online":
        name = "target.placement=zero3" + (" training.prefetch=null" if recipe.training.prefetch else "")
        yield name, _with_training(_placed(recipe, "zero3"), prefetch=None)
    if placement != "elsewhere":
        words = ["target.placement=elsewhere", "evaluation.prompts=0"]
        if not recipe.features.served and recipe.features.source != "offline":
            words.append("features.source=stream 'features.urls=[\"http://SERVER:8700\"]'")
        changed = _placed(recipe, "elsewhere")
        evaluation = recipe.evaluation.model_copy(update={"prompts": 0})
        yield " ".join(words), changed.model_copy(update={"evaluation": evaluation})


def _placed(recipe: Recipe, placement: Placement) -> Recipe:
    return recipe.model_copy(update={"target": recipe.target.model_copy(update={"placement": placement})})


def _settings(recipe: Recipe, layout: Layout, fits: Fits, changes: Changes) -> tuple[str, ...]:
    """The first single change that suffices, else the fewest in that order together, else none."""
    for name, changed in changes(recipe):
        if fits(changed, layout):
            return (name,)
    names: list[str] = []
    while (step := next(changes(recipe), None)) is not None:
        names.append(step[0])
        recipe = step[1]
        if fits(recipe, layout):
            return tuple(names)
    return ()


def _changes(recipe: Recipe, on_cpu: bool, context: int) -> Iterator[tuple[str, Recipe]]:
    """Overrides that save memory and hardly cost quality, in the order in which to try them; each once."""
    training = recipe.training
    if batches_ahead(recipe, on_cpu):
        yield "training.prefetch=0", _with_training(recipe, prefetch=0)
    if not training.gradient_checkpointing and recipe.drafter.family != "medusa":
        yield "training.gradient_checkpointing=true", _with_training(recipe, gradient_checkpointing=True)
    if training.batch_rows > 1:
        rows = training.batch_rows * training.accumulation
        changed = _with_training(recipe, batch_rows=1, accumulation=rows)
        yield f"training.batch_rows=1 training.accumulation={rows}", changed
    data = recipe.data.within(context)
    if training.packing and training.row_length > data.max_length:
        # No sample may be longer than a row, as far as the recipe tells.
        first = "" if data == recipe.data else f"data.max_length={data.max_length} "
        changed = _with_training(recipe, row_length=data.max_length).model_copy(update={"data": data})
        yield f"{first}training.row_length={data.max_length}", changed
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
