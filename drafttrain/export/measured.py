"""What is known about how good a draft is: measurements found in its run's folder."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.files import read_json, read_jsonl


@dataclass(frozen=True)
class Measurement:
    """One row of an evaluation: a setting of a suite.

    Attributes:
        suite: its name.
        k, temperature, batch: the setting.
        tau, tau_ci: acceptance length, bonus token included, and its 95 % interval.
        alpha: P(depth i accepted | depth i-1 accepted).
        chain_ci: 95 % intervals of tokens a round with 1, 2, ... draft tokens, every round drafting them all; [] where
            they were not measured.
        per_position: P(depth i accepted), unconditional: what vLLM's counters give.
        acceptance_rate: accepted / proposed.
        speedup, speedup_ci: over the same engine without drafting, or None.
        hardware, date: where and when.
    """

    suite: str
    k: int
    temperature: float
    batch: int
    tau: float
    tau_ci: tuple[float, float] | None
    alpha: list[float | None]
    per_position: list[float | None]
    acceptance_rate: float | None
    speedup: float | None
    speedup_ci: tuple[float, float] | None
    hardware: str
    date: str
    chain_ci: list[tuple[float, float]] = field(default_factory=list)


def measurements(run: Path, recipe: str) -> list[Measurement]:
    """The rows of this run's draft in `eval/*/result.json`."""
    found = []
    for path in sorted(run.glob("eval/*/result.json")):
        result = read_json(path)
        for row in result["drafts"]:
            if row["draft"] == recipe and row["acceptance"]["tau"] is not None:
                found.append(_row(result, row))
    return found


def _row(result: dict[str, Any], row: dict[str, Any]) -> Measurement:
    acceptance, speed, setting = row["acceptance"], row["speed"] or {}, row["setting"]
    return Measurement(
        suite=result["suite"]["name"],
        k=setting["k"],
        temperature=setting["temperature"],
        batch=setting["batch"],
        tau=acceptance["tau"],
        tau_ci=_interval(acceptance["tau_ci"]),
        alpha=acceptance["alpha"],
        per_position=acceptance["per_position"],
        acceptance_rate=acceptance["acceptance_rate"],
        speedup=speed.get("speedup"),
        speedup_ci=_interval(speed.get("speedup_ci")),
        hardware=result["hardware"],
        date=result["date"],
        chain_ci=[(float(low), float(high)) for low, high in acceptance.get("chain_ci", [])],
    )


def _interval(value: Any) -> tuple[float, float] | None:
    return None if value is None else (float(value[0]), float(value[1]))


def while_training(run: Path) -> dict[str, Any] | None:
    """The best acceptance measured on held-out prompts during training, from `metrics.jsonl`."""
    path = run / "metrics.jsonl"
    if not path.exists():
        return None
    records = [record for _, record in read_jsonl(path) if record.get("kind") == "eval"]
    return max(records, key=lambda record: record["tau"], default=None)
