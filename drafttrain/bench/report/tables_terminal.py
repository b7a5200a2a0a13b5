"""The four tables, and what the cost model says, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from drafttrain.bench.cost_model import CostModel, cost_models
from drafttrain.bench.report import text
from drafttrain.bench.result import EvalResult
from drafttrain.bench.speed import Cell
from drafttrain.bench.tables import TITLES, Grid, Listing, VariantRow, tables


def section_tables(result: EvalResult) -> Iterator[RenderableType]:
    """Every section, or the line that says how to get it."""
    found = tables(result)
    for name, title in TITLES.items():
        if name in found.missing:
            yield Text(f"{title}: {found.missing[name]}", style="dim")
        for part in getattr(found, name):
            table = _grid(title, part) if isinstance(part, Grid) else _listing(title, part, with_cost=name == "variant")
            yield apart(table)
    for model in cost_models(result):
        yield apart(_model(model))


def table_of_drafts(title: str, caption: str) -> Table:
    """A table whose rows are drafts, with the column of their names."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    # A narrow terminal folds long names, and hides no figure.
    table.add_column("draft", overflow="fold", min_width=10)
    return table


def apart(table: Table) -> Padding:
    """A table with an empty line behind it."""
    return Padding(table, (0, 0, 1, 0))


def _grid(title: str, grid: Grid) -> Table:
    caption = f"columns: {grid.along}; n: answers; ranges: 95 % intervals over prompts"
    table = table_of_drafts(f"{title} · {grid.held}", caption)
    for column, answers in zip(grid.columns, grid.answers, strict=True):
        table.add_column(f"{column}\nn={answers}", no_wrap=True)
    for series in grid.series:
        table.add_row(series.draft, *map(_cell, series.cells))
    return table


def _cell(cell: Cell | None) -> str:
    figure = text.cell(cell)
    return f"{figure}\n{text.span(cell.speedup_ci)}" if cell is not None and cell.speedup_ci else figure


def _listing(title: str, listing: Listing, *, with_cost: bool) -> Table:
    caption = "memory: weights + caches that the draft adds"
    if with_cost:
        caption += "; training: the draft's alone"
    table = table_of_drafts(f"{title} · {listing.held}", caption)
    table.add_column("fastest" if not with_cost else "variant", overflow="fold", min_width=6)
    for name in ("tau", "accepted", "speed-up"):
        table.add_column(name, no_wrap=True)
    table.add_column("memory", overflow="fold", min_width=8)
    if with_cost:
        table.add_column("training", overflow="fold", min_width=8)
    for row in listing.rows:
        table.add_row(*_variant(row), *([text.trained(row)] if with_cost else []))
    return table


def _variant(row: VariantRow) -> Iterator[str]:
    yield row.draft
    yield row.variant
    yield text.number(row.cell.tau) + (f"\n{text.span(row.tau_ci)}" if row.tau_ci else "")
    yield text.percent(row.acceptance_rate)
    yield _cell(row.cell)
    yield text.added(row.memory)


def _model(model: CostModel) -> Table:
    table = table_of_drafts(
        f"Predicted and measured · T={model.temperature:g}",
        f"predicted: from round times fitted over all settings, off by {text.percent(model.error)} in the median. "
        "of max: of what an engine without overhead would reach. host: share of decoding time.",
    )
    for name in ("K", "batch", "predicted", "measured", "ratio", "of max", "host"):
        table.add_column(name, no_wrap=True)
    for p in model.predictions:
        table.add_row(
            p.draft,
            str(p.setting.k),
            str(p.setting.batch),
            text.number(p.predicted, 2, "x"),
            text.number(p.measured, 2, "x"),
            text.number(p.ratio),
            text.percent(p.of_ceiling, 0),
            text.percent(p.host_share),
        )
    return table
