"""What happens beside training: records for logs and trackers, acceptance measured in the real engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from drafttrain.drafters.base import Drafter
from drafttrain.errors import UserError
from drafttrain.recipe.training_config import TrackingConfig


class Listener(Protocol):
    """Gets every record of a run, on the main rank."""

    def on_record(self, record: dict[str, Any]) -> None:
        """`record["kind"]` is "train", "eval" or "guard"; `record["step"]` counts optimiser steps done."""
        ...

    def close(self) -> None:
        """The run ends, for whatever reason."""
        ...


@dataclass(frozen=True)
class Acceptance:
    """A measurement in the engine.

    Attributes:
        tau: emitted / rounds, pooled, the target's own token included.
        alpha: P(depth i accepted | depth i-1 accepted), for i from 1.
        k: draft tokens a round.
        rounds: rounds measured.
        seconds: wall time.
    """

    tau: float
    alpha: list[float]
    k: int
    rounds: int
    seconds: float


MeasureAcceptance = Callable[[Drafter], Acceptance]
"""Measures a draft; must leave its parameters and training mode as they were."""


def require_tracker(config: TrackingConfig) -> None:
    """Refuse at the start what would fail after hours of data and features.

    Raises:
        UserError: wandb is asked for and not installed.
    """
    if config.wandb != "off" and find_spec("wandb") is None:
        raise UserError(
            f"tracking.wandb is {config.wandb!r}, but wandb is not installed",
            remedy="pip install 'drafttrain[wandb]', or set tracking.wandb=off",
        )


class WandbTracker:
    """Sends records to wandb; offline unless asked."""

    def __init__(self, config: TrackingConfig, name: str, folder: Path, recipe: dict[str, Any]) -> None:
        import wandb

        mode: Any = config.wandb
        self._run = wandb.init(
            project=config.project,
            name=name,
            dir=str(folder),
            mode=mode,
            config=recipe,
            resume="allow",
            id=name,
        )

    def on_record(self, record: dict[str, Any]) -> None:
        """Log a record under its kind; lists become one value an index."""
        flat: dict[str, Any] = {}
        for key, value in record.items():
            if isinstance(value, list):
                flat |= {f"{record['kind']}/{key}/{index}": item for index, item in enumerate(value)}
            elif key not in ("kind", "step"):
                flat[f"{record['kind']}/{key}"] = value
        self._run.log(flat, step=record["step"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
