"""How figures are written in every report."""

from __future__ import annotations

from drafttrain.bench.bootstrap import Interval
from drafttrain.bench.result import BASELINE, DraftResult, Memory
from drafttrain.bench.speed import Cell, Speed
from drafttrain.bench.tables import VariantRow
from drafttrain.files import size_text

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


def span(ends: Interval | None) -> str:
    """A confidence interval for a narrow column."""
    return "" if ends is None else f"{ends[0]:.2f}–{ends[1]:.2f}"


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


def cell(value: Cell | None) -> str:
    """The speed-up of a table's cell without its interval."""
    if value is None:
        return MISSING
    return "no result" if value.flag else number(value.speedup, 2, "x")


def added(memory: Memory | None) -> str:
    """Memory of a draft: weights, and caches."""
    if memory is None:
        return MISSING
    return f"{size_text(memory.weights)} + {size_text(memory.state)}" if memory.total else "none"


def trained(row: VariantRow) -> str:
    """What a draft cost to train."""
    if not row.trained:
        return "none"
    cost = row.training
    if cost is None:
        return "unknown"
    return f"{_count(cost.tokens)} tokens, {cost.hours:.2g} h on {cost.hardware}"


def _count(value: int) -> str:
    for unit, step in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= step:
            return f"{value / step:.3g}{unit}"
    return str(value)
