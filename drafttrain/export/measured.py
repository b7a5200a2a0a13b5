"""What is known about how good a draft is: measurements found in its run's folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


@dataclass(frozen=True)
class Evidence:
    """What a run's folder says of one of its drafts.

    Attributes:
        rows: of evaluations.
        in_training: its acceptance on held-out prompts, measured when its training stood there; None where it was not.
        outdated: suites whose results are of another draft of the run, by name.
    """

    rows: list[Measurement]
    in_training: dict[str, Any] | None
    outdated: list[str]

    @staticmethod
    def of(run: Path, provenance: Mapping[str, Any], weights: str) -> Evidence:
        """From `eval/*/result.json` and `metrics.jsonl`.

        Args:
            run: the folder.
            provenance: of the draft.
            weights: SHA-256 of its weights as they are saved: a run that was trained on has other drafts.
        """
        results = [(path.parent.name, read_json(path)) for path in sorted(run.glob("eval/*/result.json"))]
        # Results from before it was kept do not say whose they are.
        others = [name for name, result in results if result.get("weights") not in (None, "", weights)]
        own = [result for name, result in results if name not in others]
        return Evidence(
            [row for result in own for row in measurements(result, str(provenance.get("recipe")))],
            while_training(run, provenance.get("step")),
            others,
        )


def measurements(result: Mapping[str, Any], recipe: str) -> Iterator[Measurement]:
    """The rows of a draft in the content of a `result.json`, by the name of its recipe."""
    for row in result["drafts"]:
        if row["draft"] == recipe and row["acceptance"]["tau"] is not None:
            yield _row(result, row)


def _row(result: Mapping[str, Any], row: Mapping[str, Any]) -> Measurement:
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


def while_training(run: Path, step: int | None = None) -> dict[str, Any] | None:
    """The acceptance on held-out prompts that `metrics.jsonl` has of a draft.

    Args:
        step: of the draft; where it is not known, the best of the run is meant.
    """
    path = run / "metrics.jsonl"
    if not path.exists():
        return None
    records = [record for _, record in read_jsonl(path) if record.get("kind") == "eval"]
    if step is not None:
        records = [record for record in records if record["step"] == step]
    return max(records, key=lambda record: record["tau"], default=None)
