"""Steps that would do harm: a loss or gradient that is not finite, a loss far above the recent ones.

A dropped step still counts: the learning rate and the data go on as if it had been taken, so that every window of
data is seen at most once and a run that keeps dropping steps ends all the same.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from drafttrain.recipe.training_config import GuardConfig

Action = Literal["stop", "skip", "rollback"]
Kind = Literal["loss", "gradient", "spike"]


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a step.

    Attributes:
        kind: "loss" and "gradient" are not finite, "spike" is a loss that is.
        what: for messages.
    """

    kind: Kind
    what: str


class LossGuard:
    """Judges steps and decides what becomes of them; every rank sees the same losses and decides alike.

    Args:
        config: the recipe's.

    Attributes:
        dropped: steps dropped in the whole run.
        in_a_row: steps dropped since the last one that was taken.
        rollbacks: since the last checkpoint.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.dropped = self.in_a_row = self.rollbacks = 0
        self._recent: deque[float] = deque(maxlen=config.window)

    @property
    def rolls_back(self) -> bool:
        """Whether a checkpoint has to be there from the first step on."""
        return self.config.rolls_back

    def of_loss(self, loss: float) -> Trouble | None:
        """Judge the loss of a step over all ranks; spikes once a whole window of losses is known."""
        if not math.isfinite(loss):
            return Trouble("loss", "the loss is NaN or infinite")
        if self.config.spike == "off" or len(self._recent) < self.config.window:
            return None
        usual = median(self._recent)
        if loss <= self.config.spike_factor * usual:
            return None
        return Trouble(
            "spike", f"the loss is {loss:.4g}, the median of the last {self.config.window} steps {usual:.4g}"
        )

    def of_norm(self, norm: float) -> Trouble | None:
        """Judge the norm of the gradient over all ranks."""
        return None if math.isfinite(norm) else Trouble("gradient", "the gradient is NaN or infinite")

    def taken(self, loss: float) -> None:
        """A step was taken."""
        self._recent.append(loss)
        self.in_a_row = 0

    def saved(self) -> None:
        """A checkpoint is written; one that follows a taken step is something new to roll back to."""
        if not self.in_a_row:
            self.rollbacks = 0

    def decide(self, trouble: Trouble) -> tuple[Action, str]:
        """What to do about a step, and where its limit is spent, a few words about that."""
        action = self._wanted(trouble)
        if action == "stop":
            return "stop", ""
        self.dropped += 1
        self.in_a_row += 1
        if action == "rollback":
            self.rollbacks += 1
        limit = self.config.limit
        if action == "skip" and self.in_a_row > limit:
            return "stop", f"; training.guard.limit allows {limit} dropped steps in a row"
        if action == "rollback" and self.rollbacks > limit:
            return "stop", f"; training.guard.limit allows {limit} rollbacks to one checkpoint"
        return action, ""

    def _wanted(self, trouble: Trouble) -> Action:
        if trouble.kind != "spike":
            return self.config.non_finite
        assert self.config.spike != "off"
        return self.config.spike

    def recall(self, saved: dict[str, Any]) -> None:
        """Compare with the losses before a checkpoint again: its draft may be far from the one that is given up."""
        self._recent = deque(saved.get("recent", []), maxlen=self.config.window)

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint; an empty dict is a fresh start."""
        self.recall(saved)
        self.dropped, self.in_a_row, self.rollbacks = (
            saved.get(key, 0) for key in ("dropped", "in_a_row", "rollbacks")
        )

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        counts = {"dropped": self.dropped, "in_a_row": self.in_a_row, "rollbacks": self.rollbacks}
        return {"recent": list(self._recent), **counts}
