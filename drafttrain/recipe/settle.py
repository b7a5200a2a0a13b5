"""`auto` in a recipe becomes what a run had, or what its machine computes in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from drafttrain.config import Config
from drafttrain.errors import RecipeError
from drafttrain.recipe.schema import RESOLVED, Recipe
from drafttrain.recipe.yaml_source import parse_yaml
from drafttrain.targets.config import AUTO

Native = Callable[[str], str]
"""A device by name -> "bfloat16" or "float32"."""


def settle(recipe: Recipe, native: Native | None = None) -> Recipe:
    """Without `auto`: a run that goes on elsewhere goes on in the dtypes that it began with. A target that vLLM runs is
    in bfloat16, wherever the draft is.

    Args:
        native: what a device computes in; default: asked of this machine.
    """
    target, training = recipe.target, recipe.training
    if AUTO not in (target.dtype, training.precision):
        return recipe
    if native is None:
        from drafttrain.targets.native import native_dtype  # imports torch

        native = native_dtype
    earlier = _of_run(Path(recipe.run_folder))
    changed: dict[str, Config] = {}
    if target.dtype == AUTO:
        own = "bfloat16" if recipe.features.source == "vllm" else native(target.device)
        dtype = _chosen(earlier, "target", target, "dtype") or own
        changed["target"] = target.model_copy(update={"dtype": dtype})
    if training.precision == AUTO:
        own = "bf16" if native(target.device) == "bfloat16" else "fp32"
        precision = _chosen(earlier, "training", training, "precision") or own
        changed["training"] = training.model_copy(update={"precision": precision})
    return recipe.model_copy(update=changed)


def _of_run(folder: Path) -> dict[str, Any]:
    """The resolved recipe there; empty where there is none that can be read, of which others complain."""
    with suppress(OSError, UnicodeDecodeError, RecipeError):
        return parse_yaml((folder / RESOLVED).read_text(encoding="utf-8"), RESOLVED).data
    return {}


def _chosen(earlier: dict[str, Any], section: str, now: Config, key: str) -> Any:
    values = earlier.get(section)
    value = values.get(key) if isinstance(values, dict) else None
    known = get_args(type(now).model_fields[key].annotation)
    return value if value in known and value != AUTO else None
