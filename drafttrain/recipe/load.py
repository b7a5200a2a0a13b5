"""Recipes from YAML files and `key=value` overrides."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from drafttrain.config import Config
from drafttrain.errors import RecipeError
from drafttrain.files import atomic_file, find_resource
from drafttrain.recipe.checks import check_sections
from drafttrain.recipe.problems import InvalidRecipe, Problem
from drafttrain.recipe.schema import RESOLVED, SHORTHANDS, Recipe
from drafttrain.recipe.settle import Native, settle
from drafttrain.recipe.validate import validate
from drafttrain.recipe.yaml_source import Source, apply_overrides, dump_yaml, parse_yaml
from drafttrain.targets.config import TargetConfig

C = TypeVar("C", bound=Config)
Check = Callable[[Mapping[str, Any]], Iterable[Problem]]


def load_recipe(path: str | Path, overrides: Sequence[str] = (), native: Native | None = None) -> Recipe:
    """Read a recipe: a path, a name that ships (`recipes/quickstart.yaml`), or a run's folder; `auto` is settled.

    Args:
        path, overrides: see `load_config`.
        native: see `settle`.

    Raises:
        InvalidRecipe: with every problem at once: YAML, keys, types, bounds, combinations.
        RecipeError: no such file, or not YAML.
    """
    file = Path(path).expanduser()
    if (file / RESOLVED).is_file():
        file = file / RESOLVED
    elif file.is_dir():
        raise RecipeError(
            f"the folder holds no {RESOLVED}",
            where=path,
            remedy="give a recipe, or the folder of a run whose training has begun",
        )
    return settle(load_config(Recipe, file, overrides, shorthands=SHORTHANDS, check=check_sections), native)


class _Bare(Config):
    target: TargetConfig


def load_target_config(model: str, overrides: Sequence[str] = ()) -> TargetConfig:
    """A target that no recipe describes, with `target.key=value` applied.

    Raises:
        InvalidRecipe: overrides of other sections, or that do not fit.
    """
    text = dump_yaml({"target": {"model": model}})
    config = parse_config(_Bare, text, overrides, where=model, shorthands={}, check=lambda _: ()).target
    from drafttrain.targets.native import settled  # imports torch

    return settled(config)


def load_config(
    schema: type[C],
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    shorthands: Mapping[str, str] | None = None,
    check: Check | None = None,
) -> C:
    """Read any YAML file into its schema, all problems in one error.

    Args:
        schema: a `Config` class.
        path: resolved by `find_resource`.
        overrides: `a.b.0=value`, values in YAML, applied in order.
        shorthands: top-level keys that may be written as one string, and the key below it that is meant.
        check: looks at the sections that are valid by themselves for combinations that cannot work.
    """
    file = find_resource(path)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"is not UTF-8 text: {error}", where=file, remedy="convert it to UTF-8") from None
    except OSError as error:
        raise RecipeError(f"cannot be read: {error.strerror or error}", where=file) from None
    return parse_config(
        schema, text, overrides, where=str(path), shorthands=shorthands or {}, check=check or (lambda _: ())
    )


def parse_config(
    schema: type[C],
    text: str,
    overrides: Sequence[str] = (),
    *,
    where: str,
    shorthands: Mapping[str, str],
    check: Check,
) -> C:
    """`load_config` for text already read; `where` names it in errors."""
    source = parse_yaml(text, where)
    apply_overrides(source, overrides, shorthands)
    result = validate(schema, source)
    problems = source.problems + result.problems
    problems += [_located(problem, source) for problem in check(result.sections)]
    if problems:
        raise InvalidRecipe(problems, where)
    return schema.model_validate_json(json.dumps(source.data), strict=True)


def save_recipe(recipe: Recipe, folder: str | Path) -> Path:
    """Write the resolved recipe, every default spelt out, into a run's folder; it reloads equal."""
    file = Path(folder) / RESOLVED
    values = recipe.model_dump(mode="json")
    with atomic_file(file) as partial:
        partial.write_text("# The recipe of this run, with every default.\n" + dump_yaml(values), encoding="utf-8")
    return file


def _located(problem: Problem, source: Source) -> Problem:
    return Problem(problem.path, problem.message, problem.origin or source.origin(problem.path))
