"""What becomes of a run's resolved recipe when the run goes on with another one.

`recipe.yaml` says how the newest steps were trained. Where earlier steps were trained otherwise, the recipe of theirs
stays beside it, named by the step at which it ended.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from drafttrain.errors import RecipeError
from drafttrain.files import atomic_file
from drafttrain.recipe.load import save_recipe
from drafttrain.recipe.schema import RESOLVED, Recipe
from drafttrain.recipe.yaml_source import parse_yaml

Change = tuple[Any, Any]
"""Then, and now."""

# Shape neither the steps nor the draft.
_ASIDE = ("name", "output_dir", "features", "tracking", "evaluation")
_ASIDE_OF_TRAINING = ("log_every", "save_every", "keep", "num_threads", "patience_s", "prefetch")
# What the best draft was chosen by.
_YARDSTICK = ("evaluation.k", "evaluation.max_new_tokens", "evaluation.prompts")


def earlier_name(step: int | Literal["*"]) -> str:
    """File of the recipe that the steps up to `step` were trained by; "*" = a pattern for all of them."""
    return f"recipe-until-step-{step if step == '*' else f'{step:08d}'}.yaml"


def changes(folder: Path, recipe: Recipe) -> dict[str, Change]:
    """Dotted keys in which a run's recipe differs from `recipe`; empty where there is none yet."""
    file = folder / RESOLVED
    if not file.is_file():
        return {}
    earlier = parse_yaml(file.read_text(encoding="utf-8"), str(file)).data
    # As it stands there if need be: a version of the schema that had other keys must not stop the run.
    with suppress(ValidationError):
        earlier = Recipe.model_validate(earlier).model_dump(mode="json")
    return dict(_differences("", earlier, recipe.model_dump(mode="json")))


def check_changes(folder: Path, found: Mapping[str, Change], step: int, total: int, measured: bool) -> None:
    """Refuse what would make a run that has done `step` of `total` steps contradict itself.

    Args:
        measured: its best draft was chosen already.

    Raises:
        RecipeError: no step would be trained by what is new, or acceptance would be measured by another yardstick.
    """
    elsewhere = "choose another output_dir, or train with --resume never"
    shaping = {key: change for key, change in found.items() if _shapes(key)}
    if step and step >= total and shaping:
        raise RecipeError(
            f"the run has done its {step} steps, and the recipe asks for {total}: none would be trained with "
            f"{described(shaping)}",
            where=folder,
            remedy=f"raise training.max_steps or training.epochs to go on, {elsewhere}",
        )
    yardstick = {key: change for key, change in found.items() if key in _YARDSTICK}
    if measured and yardstick:
        raise RecipeError(
            f"the best draft so far was chosen by another measurement: {described(yardstick)}",
            where=folder,
            remedy=f"keep what it was, {elsewhere}",
        )


def keep_recipe(recipe: Recipe, folder: Path, step: int, found: Mapping[str, Change]) -> str | None:
    """Write the recipe into the run's folder; the one before stays beside it where it trained the first `step` steps.

    Args:
        found: of `changes`.

    Returns:
        the line to say, or None where nothing changed.
    """
    said = None
    if found and step:
        kept = folder / earlier_name(step)
        # What was changed before at this very step trained nothing that was kept.
        if not kept.exists():
            with atomic_file(kept) as partial:
                shutil.copyfile(folder / RESOLVED, partial)
        said = f"from step {step} on the recipe is another: {described(found)}; the one before is kept as {kept.name}"
    save_recipe(recipe, folder)
    return said


def described(found: Mapping[str, Change]) -> str:
    """Changes for people."""
    return ", ".join(f"{key} {then} -> {now}" for key, (then, now) in found.items())


def _shapes(key: str) -> bool:
    section, _, rest = key.partition(".")
    return section not in _ASIDE and not (section == "training" and rest in _ASIDE_OF_TRAINING)


def _differences(path: str, then: Any, now: Any) -> Iterator[tuple[str, Change]]:
    if isinstance(then, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*then, *now]):
            yield from _differences(f"{path}.{name}" if path else name, then.get(name), now.get(name))
    elif then != now:
        yield path, (then, now)
