"""Charts of the tables: speed-up along something, and of variants."""

from __future__ import annotations

from drafttrain.bench.report import text
from drafttrain.bench.report.charts import WIDTH, Colours
from drafttrain.bench.report.svg import Canvas, short, ticks
from drafttrain.bench.tables import Grid, Listing

_LEFT, _RIGHT, _TOP, _BOTTOM, _HEIGHT = 46, 16, 12, 40, 260


def grid_chart(grid: Grid, colours: Colours) -> str:
    """A line a draft over the columns, with intervals."""
    canvas = Canvas(WIDTH, _HEIGHT)
    tops = [1.0]
    for series in grid.series:
        for cell in series.cells:
            if cell is not None and cell.speedup is not None:
                tops += [cell.speedup, *([cell.speedup_ci[1]] if cell.speedup_ci else [])]
    marks = ticks(max(tops), 5)
    bottom = _HEIGHT - _BOTTOM
    step = (WIDTH - _LEFT - _RIGHT) / len(grid.columns)

    def x(column: int, place: int) -> float:
        # Drafts stand beside each other, so that intervals do not cover each other.
        return _LEFT + step * (column + 0.5) + 7 * (place - (len(grid.series) - 1) / 2)

    def y(speedup: float) -> float:
        return bottom - (bottom - _TOP) * speedup / marks[-1]

    for mark in marks:
        canvas.line(_LEFT, y(mark), WIDTH - _RIGHT, y(mark), "axis" if mark == 0 else "grid")
        canvas.text(_LEFT - 8, y(mark) + 4, f"{short(mark)}x", anchor="end")
    for column, name in enumerate(grid.columns):
        canvas.text(_LEFT + step * (column + 0.5), bottom + 18, name, anchor="middle")
    canvas.text((_LEFT + WIDTH - _RIGHT) / 2, _HEIGHT - 4, grid.along, "label", "middle")
    canvas.line(_LEFT, y(1), WIDTH - _RIGHT, y(1), "parity")
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
    row, left = 34, 190
    height = _TOP + row * len(listing.rows) + _BOTTOM
    canvas = Canvas(WIDTH, height)
    cells = [entry.cell for entry in listing.rows]
    tops = [
        1.0,
        *(c.speedup for c in cells if c.speedup is not None),
        *(c.speedup_ci[1] for c in cells if c.speedup_ci),
    ]
    marks = ticks(max(tops), 5)
    bottom = height - _BOTTOM
    scale = (WIDTH - left - _RIGHT - 44) / marks[-1]
    for mark in marks:
        canvas.line(left + scale * mark, _TOP, left + scale * mark, bottom, "axis" if mark == 0 else "grid")
        canvas.text(left + scale * mark, bottom + 18, f"{short(mark)}x", anchor="middle")
    canvas.text((left + WIDTH - _RIGHT) / 2, height - 4, "decode tokens/s over no draft", "label", "middle")
    for index, entry in enumerate(listing.rows):
        y = _TOP + row * index + 7
        name, cell = f"{entry.draft} {entry.variant}", entry.cell
        canvas.text(left - 10, y + 14, _short(name), "tick", "end")
        if cell.speedup is None:
            canvas.text(left + 8, y + 14, "no result", "value")
            continue
        tip = f"{name}: {text.with_interval(cell.speedup, cell.speedup_ci, unit='x')}"
        canvas.rect(left, y, scale * cell.speedup, row - 14, f"fill:{colours[entry.draft]}", tip)
        end = left + scale * cell.speedup
        if cell.speedup_ci:
            low, high = (left + scale * value for value in cell.speedup_ci)
            canvas.line(low, y + (row - 14) / 2, high, y + (row - 14) / 2, "interval")
            end = max(end, high)
        canvas.text(end + 6, y + 14, f"{cell.speedup:.2f}x", "value")
    canvas.line(left + scale, _TOP, left + scale, bottom, "parity")
    said = "; ".join(f"{r.draft} {r.variant} {text.cell(r.cell)}" for r in listing.rows)
    return canvas.render(f"Speed-up by variant: {said}")


def _short(name: str, longest: int = 27) -> str:
    """What fits beside the bars; the table has it whole."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"
