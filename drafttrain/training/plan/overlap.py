"""What of a run's hours goes on at the same time: the target's forwards and the draft's steps."""

from __future__ import annotations

from enum import StrEnum

from drafttrain.recipe.schema import Recipe
from drafttrain.training.ahead import batches_ahead
from drafttrain.training.plan.layout import Layout


class Overlap(StrEnum):
    """Where the target's forwards lie beside the steps of the draft."""

    NONE = "each step waits for its forward, or the store is filled first"
    BEFORE = "a store is there before the run begins"
    BESIDE = "on devices of their own, while the draft trains"
    SHARED = "on the draft's own GPU, as far as that has room"


def overlap_of(recipe: Recipe, layout: Layout, on_cpu: bool) -> Overlap:
    """How a recipe runs in a layout.

    Args:
        on_cpu: target and draft would share the cores, each of which computes all the time as it is.
    """
    elsewhere, features = layout.placement == "elsewhere", recipe.features
    if features.source == "offline":
        return Overlap.BEFORE if elsewhere and not features.urls else Overlap.NONE
    if not batches_ahead(recipe, on_cpu, layout.placement):
        return Overlap.NONE
    if elsewhere or features.served:
        return Overlap.BESIDE
    return Overlap.NONE if on_cpu else Overlap.SHARED


def run_hours(how: Overlap, states: float, steps: float, share: float) -> tuple[float, float]:
    """Hours of the ranks that train: those to count on, and those at best.

    Args:
        states: hours of the target's forwards.
        steps: hours of everything that a step computes after them.
        share: of the steps, those whose states are computed; the others read a store.
    """
    in_turn = states + steps
    overlapped = max(states, share * steps) + (1 - share) * steps
    if how is Overlap.BEFORE:
        return steps, steps
    if how is Overlap.BESIDE:
        return overlapped, overlapped
    return in_turn, overlapped if how is Overlap.SHARED else in_turn
