"""Where target and draft may lie over the ranks of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from drafttrain.training.launch import Launch

Placement = Literal["whole", "zero3", "elsewhere"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

ALONE = Launch()
LAUNCHES = (ALONE, *(Launch("zero", stage) for stage in range(4)), Launch("fsdp2"))
# In the order in which they are tried: each takes less memory and talks more than the one before.
_PREFERRED = (ALONE, Launch("zero", 1), Launch("zero", 2), Launch("zero", 3))


@dataclass(frozen=True)
class Layout:
    """A placement of the target and a way of training the draft over ranks.

    Attributes:
        placement: of the target, as in the recipe.
        launch: of the draft, as the launch config says.
    """

    placement: Placement
    launch: Launch

    def exists(self, ranks: int) -> bool:
        """Whether a run of `ranks` can be laid out so."""
        if self.placement == "zero3":
            return ranks > 1 and self.launch.kind == "zero" and self.launch.stage in (1, 2)
        return ranks > 1 or self.launch == ALONE

    @property
    def config(self) -> str:
        """The launch config that asks for it."""
        launch = self.launch
        name = {"replicated": "ddp", "zero": f"zero{launch.stage}", "fsdp2": "fsdp2"}[launch.kind]
        return f"recipes/accelerate/{name}.yaml"


def preferred(placement: Placement, ranks: int) -> Iterator[Layout]:
    """Layouts of a placement, the plainest first."""
    layouts = (Layout(placement, launch) for launch in _PREFERRED)
    return (layout for layout in layouts if layout.exists(ranks))
