"""How many micro-batches are made ready ahead where the recipe leaves it open."""

from __future__ import annotations

from drafttrain.recipe.schema import Recipe

_NONE, _BESIDE, _READ = 0, 1, 2


def batches_ahead(recipe: Recipe, on_cpu: bool, placement: str | None = None) -> int:
    """`training.prefetch`, or what suits the source and the device.

    Args:
        on_cpu: where target and draft share the cores, so that neither would be faster beside the other.
        placement: of the target, where it is another than the recipe's.
    """
    placement = placement or recipe.target.placement
    if placement == "zero3":
        return _NONE  # forwards are made by all ranks together, in the order of the loop
    if recipe.training.prefetch is not None:
        return recipe.training.prefetch
    if placement == "elsewhere" or recipe.features.served or recipe.features.source == "offline":
        return _READ
    return _NONE if on_cpu else _BESIDE
