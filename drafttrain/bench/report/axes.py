"""What charts share: value axes with their grid, and the bars of speed-ups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from drafttrain.bench.bootstrap import Interval
from drafttrain.bench.report import text
from drafttrain.bench.report.svg import Canvas, short

WIDTH = 560
LEFT, RIGHT, TOP, BOTTOM = 46, 16, 12, 40
OVER_NO_DRAFT = "decode tokens/s over no draft"
# Beside the longest bar, for its figure.
ROOM_FOR_FIGURES = 44

Scale = Callable[[float], float]
"""From a value to its place."""


def across(canvas: Canvas, marks: Sequence[float], left: float, label: str, unit: str = "", room: float = 0) -> Scale:
    """An axis from left to right, its grid over the whole height; `room` is kept free at the end."""
    bottom, low = canvas.height - BOTTOM, marks[0]
    width = (WIDTH - left - RIGHT - room) / (marks[-1] - low)

    def x(value: float) -> float:
        return left + width * (value - low)

    for mark in marks:
        canvas.line(x(mark), TOP, x(mark), bottom, "axis" if mark == low else "grid")
        canvas.text(x(mark), bottom + 18, f"{short(mark)}{unit}", anchor="middle")
    _label(canvas, left, label)
    return x


def upwards(canvas: Canvas, marks: Sequence[tuple[float, str]], label: str) -> Scale:
    """An axis upwards from 0, with marks as (value, text); `label` is that of what stands along the bottom."""
    bottom, top = canvas.height - BOTTOM, marks[-1][0]

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * value / top

    for mark, shown in marks:
        canvas.line(LEFT, y(mark), WIDTH - RIGHT, y(mark), "axis" if mark == 0 else "grid")
        canvas.text(LEFT - 8, y(mark) + 4, shown, anchor="end")
    _label(canvas, LEFT, label)
    return y


def _label(canvas: Canvas, left: float, label: str) -> None:
    canvas.text((left + WIDTH - RIGHT) / 2, canvas.height - 4, label, "label", "middle")


@dataclass(frozen=True)
class Rows:
    """Bars below each other.

    Attributes:
        count: of them.
        height: of a row.
        bar: height of what is drawn in it.
        left: where bars begin, behind their names.
    """

    count: int
    height: float
    bar: float
    left: float

    def canvas(self) -> Canvas:
        """One that they fit on, with an axis below."""
        return Canvas(WIDTH, TOP + self.height * max(self.count, 1) + BOTTOM)

    def top(self, index: int) -> float:
        """Upper edge of a bar."""
        return TOP + self.height * index + (self.height - self.bar) / 2

    def middle(self, index: int) -> float:
        """Half its height."""
        return self.top(index) + self.bar / 2

    def write(self, canvas: Canvas, index: int, x: float, content: str) -> None:
        """A figure beside or on a bar."""
        canvas.text(x, self.middle(index) + 4, content, "value")

    def name(self, canvas: Canvas, index: int, content: str) -> None:
        """A bar's name before it."""
        canvas.text(self.left - 10, self.middle(index) + 4, content, "tick", "end")


def highest(speedups: Iterable[float | None], intervals: Iterable[Interval | None]) -> float:
    """Up to where an axis of speed-ups goes: 1 at least."""
    upper = [interval[1] for interval in intervals if interval is not None]
    return max([1.0, *upper, *(value for value in speedups if value is not None)])


def speedup_bar(
    canvas: Canvas,
    rows: Rows,
    index: int,
    x: Scale,
    name: str,
    colour: str,
    speedup: float,
    interval: Interval | None,
    ceiling: float | None = None,
) -> None:
    """A speed-up with its interval and its figure; a tick at the `ceiling`."""
    middle, end = rows.middle(index), x(speedup)
    tip = f"{name}: {text.with_interval(speedup, interval, unit='x')}"
    canvas.rect(rows.left, rows.top(index), x(speedup) - rows.left, rows.bar, f"fill:{colour}", tip)
    if interval:
        low, high = (x(value) for value in interval)
        canvas.line(low, middle, high, middle, "interval")
        for cap in (low, high):
            canvas.line(cap, middle - 4, cap, middle + 4, "interval")
        end = max(end, high)
    if ceiling is not None:
        tick = x(ceiling)
        canvas.line(tick, rows.top(index) - 3, tick, rows.top(index) + rows.bar + 3, "ceiling")
        if abs(tick - end) < ROOM_FOR_FIGURES:
            end = max(tick, end)
    rows.write(canvas, index, end + 6, f"{speedup:.2f}x")


def parity(canvas: Canvas, x: Scale) -> None:
    """Where nothing is gained."""
    canvas.line(x(1), TOP, x(1), canvas.height - BOTTOM, "parity")
