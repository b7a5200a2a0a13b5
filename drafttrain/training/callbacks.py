"""What happens beside training: records for logs and trackers, acceptance measured in the real engine."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from drafttrain.drafters.base import Drafter
from drafttrain.errors import UserError
from drafttrain.files import atomic_file
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


def tracker_id(folder: Path, name: str, *, resumed: bool) -> str:
    """What the tracker knows this run by: its own, since runs in other folders may have its name, and since a tracker
    drops what goes back to steps that it has.

    Args:
        folder: of the run, which keeps it.
        name: of the run; the id of runs from before it was kept.
        resumed: whether this launch goes on with the run.
    """
    file = folder / "wandb.id"
    if resumed:
        return file.read_text(encoding="utf-8").strip() if file.exists() else name
    made = f"{name}-{uuid.uuid4().hex[:8]}"
    with atomic_file(file) as partial:
        partial.write_text(f"{made}\n", encoding="utf-8")
    return made


class WandbTracker:
    """Sends records to wandb; offline unless asked.

    Args:
        name: as wandb shows it; `run_id`: as it knows it, see `tracker_id`.
        folder: where wandb keeps its files.
        recipe: in JSON form.
    """

    def __init__(self, config: TrackingConfig, name: str, run_id: str, folder: Path, recipe: dict[str, Any]) -> None:
        import wandb

        mode: Any = config.wandb
        self._run = wandb.init(
            project=config.project,
            name=name,
            dir=str(folder),
            mode=mode,
            config=recipe,
            resume="allow",
            id=run_id,
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
