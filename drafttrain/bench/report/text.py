"""How figures are written in every report."""

from __future__ import annotations

from drafttrain.bench.bootstrap import Interval
from drafttrain.bench.result import BASELINE, DraftResult
from drafttrain.bench.speed import Speed

MISSING = "–"


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A figure, or a dash where there is none."""
    return MISSING if value is None else f"{value:.{digits}f}{unit}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share in percent."""
    return MISSING if value is None else f"{100 * value:.{digits}f} %"


def interval(ends: Interval | None, digits: int = 2) -> str:
    """A confidence interval in brackets, or nothing."""
    return "" if ends is None else f"[{ends[0]:.{digits}f}, {ends[1]:.{digits}f}]"


def with_interval(value: float | None, ends: Interval | None, digits: int = 2, unit: str = "") -> str:
    """A figure and its confidence interval."""
    return f"{number(value, digits, unit)} {interval(ends, digits)}".rstrip()


def speedup(speed: Speed | None) -> str:
    """A speed-up, or that the measurement is no result."""
    if speed is None:
        return MISSING
    return "no result" if speed.flag else number(speed.speedup, 2, "x")


def label(entry: DraftResult) -> str:
    """A draft's name for people."""
    return "no draft" if entry.draft == BASELINE else entry.draft


def chain(values: list[float | None]) -> str:
    """Rates by depth."""
    return " / ".join(number(value) for value in values) or MISSING


def tokens_per_second(entry: DraftResult) -> float | None:
    """Decode tokens per second of a draft or of the baseline; None where the speed is no result."""
    split = entry.split
    if split is None or split.total_s <= 0 or (entry.speed is not None and entry.speed.flag):
        return None
    return entry.acceptance.emitted / split.total_s
