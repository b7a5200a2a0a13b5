"""What it took to train a draft, from what its run wrote down."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.files import read_json, read_jsonl
from drafttrain.recipe.provenance import PROVENANCE, cpu_text


@dataclass(frozen=True)
class TrainingCost:
    """Training alone: neither prompts and answers nor measuring on the way.

    Attributes:
        steps: optimiser steps.
        tokens: that passed through the draft, over all epochs and ranks.
        hours: wall time of the steps.
        hardware: of the last launch.
    """

    steps: int
    tokens: int
    hours: float
    hardware: str


def training_cost(run: Path) -> TrainingCost | None:
    """From `metrics.jsonl` and `provenance.json` in a run's folder; None where nothing was logged.

    Raises:
        UserError: a file that is there and is not what a run writes.
    """
    log = run / "metrics.jsonl"
    if not log.exists():
        return None
    steps = tokens = 0
    seconds = 0.0
    for _, record in read_jsonl(log):
        if record.get("kind") == "train":
            seconds += record["seconds_per_step"] * (record["step"] - steps)
            tokens += record["tokens"]
            steps = record["step"]
    if not steps:
        return None
    file = run / PROVENANCE
    launches = read_json(file) if file.exists() else []
    return TrainingCost(steps, tokens, seconds / 3600, _hardware(launches[-1]) if launches else "unknown hardware")


def _hardware(launch: dict[str, Any]) -> str:
    found = launch["hardware"]
    if found["gpus"]:
        return f"{launch['world_size']} x {found['gpus'][0]}"
    return cpu_text(found)
