"""The four tables, and what the cost model says, as sections of the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from drafttrain.bench.cost_model import CostModel, cost_models
from drafttrain.bench.report import text
from drafttrain.bench.report.charts import Colours
from drafttrain.bench.report.table_charts import grid_chart, listing_chart
from drafttrain.bench.result import EvalResult
from drafttrain.bench.speed import Cell
from drafttrain.bench.tables import TITLES, Grid, Listing, VariantRow, tables


def table_sections(result: EvalResult, colours: Colours) -> str:
    """All sections; where one is missing, the line that says how to get it."""
    found = tables(result)
    parts = []
    for name, title in TITLES.items():
        shown: list[Grid | Listing] = getattr(found, name)
        if shown:
            parts.append(f"<h2>{title}</h2>")
        parts += [
            _grid(part, colours) if isinstance(part, Grid) else _listing(part, colours, with_cost=name == "variant")
            for part in shown
        ]
        if name in found.missing:
            parts.append(f'<p class="soft">{title}: {escape(found.missing[name])}</p>')
    return "".join(parts) + "".join(_model(model) for model in cost_models(result))


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Head is plain text, cells are <td> elements."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="table"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def value(figure: str, small: str = "") -> str:
    """A cell: a figure, and its interval in small print."""
    return f"<td>{escape(figure)}{f' <small>{escape(small)}</small>' if small else ''}</td>"


def _named(name: str, colour: str) -> str:
    return f'<td><span class="key" style="background:{colour}"></span>{escape(name)}</td>'


def _chart(caption: str, svg: str) -> str:
    return f'<div class="charts one"><div class="chart"><p>{escape(caption)}</p>{svg}</div></div>'


def _cell(cell: Cell | None) -> str:
    return value(text.cell(cell), text.interval(cell.speedup_ci) if cell else "")


def _grid(grid: Grid, colours: Colours) -> str:
    head = ["draft", *(f"{c} (n={n})" for c, n in zip(grid.columns, grid.answers, strict=True))]
    rows = [[_named(s.draft, colours[s.draft]), *map(_cell, s.cells)] for s in grid.series]
    caption = f"{grid.held}; along {grid.along}; n: answers; with 95 % intervals over prompts."
    return _table(head, rows) + _chart(caption, grid_chart(grid, colours))


def _listing(listing: Listing, colours: Colours, *, with_cost: bool) -> str:
    head = [
        "draft",
        "variant" if with_cost else "fastest variant",
        "tau",
        "accepted",
        "speed-up",
        "host time",
        "memory",
    ]
    rows = [
        [
            _named(row.draft, colours[row.draft]),
            *_variant(row),
            *([f'<td class="wrap">{escape(text.trained(row))}</td>'] if with_cost else []),
        ]
        for row in listing.rows
    ]
    caption = f"{listing.held}. Memory: weights + caches that the draft adds, as the engine holds them."
    if with_cost:
        head.append("training")
        caption += " Training: the draft's alone, without prompts and answers."
    return _table(head, rows) + _chart(caption, listing_chart(listing, colours))


def _variant(row: VariantRow) -> list[str]:
    return [
        value(row.variant),
        value(text.number(row.cell.tau), text.interval(row.tau_ci)),
        value(text.percent(row.acceptance_rate)),
        _cell(row.cell),
        value(text.percent(row.host_share)),
        value(text.added(row.memory)),
    ]


def _model(model: CostModel) -> str:
    rows = [
        [
            value(p.draft),
            value(str(p.setting)),
            value(text.number(p.predicted, 2, "x")),
            value(text.number(p.measured, 2, "x")),
            value(text.number(p.ratio)),
            value(text.percent(p.of_ceiling, 0)),
            value(text.percent(p.host_share)),
        ]
        for p in model.predictions
    ]
    kind = "greedy" if model.temperature == 0 else f"temperature {model.temperature:g}"
    return (
        f"<h2>Predicted and measured, {kind}</h2>"
        '<p class="soft">Predicted from round times by batch, width and draft steps, fitted over all settings; off by '
        f"{text.percent(model.error)} in the median. It holds for this machine, target and engine.</p>"
        + _table(["draft", "setting", "predicted", "measured", "ratio", "of ceiling", "host time"], rows)
    )
