"""Charts of the tables: speed-up along something, and of variants."""

from __future__ import annotations

from drafttrain.bench.report import text
from drafttrain.bench.report.axes import (
    BOTTOM,
    LEFT,
    OVER_NO_DRAFT,
    RIGHT,
    ROOM_FOR_FIGURES,
    WIDTH,
    Rows,
    across,
    highest,
    parity,
    speedup_bar,
    upwards,
)
from drafttrain.bench.report.charts import Colours
from drafttrain.bench.report.svg import Canvas, short, ticks
from drafttrain.bench.tables import Grid, Listing

_HEIGHT = 260


def grid_chart(grid: Grid, colours: Colours) -> str:
    """A line a draft over the columns, with intervals."""
    canvas = Canvas(WIDTH, _HEIGHT)
    cells = [cell for series in grid.series for cell in series.cells if cell is not None]
    marks = ticks(highest([cell.speedup for cell in cells], [cell.speedup_ci for cell in cells]), 5)
    y = upwards(canvas, [(mark, f"{short(mark)}x") for mark in marks], grid.along)
    step = (WIDTH - LEFT - RIGHT) / len(grid.columns)

    def x(column: int, place: int) -> float:
        # Drafts stand beside each other, so that intervals do not cover each other.
        return LEFT + step * (column + 0.5) + 7 * (place - (len(grid.series) - 1) / 2)

    for column, name in enumerate(grid.columns):
        canvas.text(LEFT + step * (column + 0.5), _HEIGHT - BOTTOM + 18, name, anchor="middle")
    canvas.line(LEFT, y(1), WIDTH - RIGHT, y(1), "parity")
    for place, series in enumerate(grid.series):
        colour = colours[series.draft]
        points = []
        for column, cell in enumerate(series.cells):
            if cell is None or cell.speedup is None:
                continue
            here = x(column, place)
            points.append((here, y(cell.speedup)))
            if cell.speedup_ci:
                low, high = cell.speedup_ci
                canvas.line(here, y(low), here, y(high), "whisker", f"stroke:{colour}")
            tip = f"{series.draft}, {grid.along} {grid.columns[column]}: " + text.with_interval(
                cell.speedup, cell.speedup_ci, unit="x"
            )
            canvas.dot(here, y(cell.speedup), f"fill:{colour}", tip)
        canvas.polyline(points, "series", f"stroke:{colour}")
    said = "; ".join(f"{s.draft} {', '.join(map(text.cell, s.cells))}" for s in grid.series)
    return canvas.render(f"Speed-up by {grid.along} ({', '.join(grid.columns)}): {said}")


def listing_chart(listing: Listing, colours: Colours) -> str:
    """A bar a variant."""
    rows = Rows(len(listing.rows), height=34, bar=20, left=190)
    canvas = rows.canvas()
    cells = [entry.cell for entry in listing.rows]
    marks = ticks(highest([cell.speedup for cell in cells], [cell.speedup_ci for cell in cells]), 5)
    x = across(canvas, marks, rows.left, OVER_NO_DRAFT, "x", ROOM_FOR_FIGURES)
    for index, entry in enumerate(listing.rows):
        name, cell = f"{entry.draft} {entry.variant}", entry.cell
        rows.name(canvas, index, _short(name))
        if cell.speedup is None:
            rows.write(canvas, index, rows.left + 8, "no result")
            continue
        speedup_bar(canvas, rows, index, x, name, colours[entry.draft], cell.speedup, cell.speedup_ci)
    parity(canvas, x)
    said = "; ".join(f"{r.draft} {r.variant} {text.cell(r.cell)}" for r in listing.rows)
    return canvas.render(f"Speed-up by variant: {said}")


def _short(name: str, longest: int = 27) -> str:
    """What fits beside the bars; the table has it whole."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
