"""The result table of the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drafttrain.bench.bootstrap import Interval
from drafttrain.bench.report import text
from drafttrain.bench.report.tables_terminal import apart, section_tables, table_of_drafts
from drafttrain.bench.result import BASELINE, DraftResult, EvalResult, Setting

_COLUMNS = ("tau", "accepted", "alpha by depth", "tokens/s", "speed-up", "of max", "exact")


def result_table(result: EvalResult) -> RenderableType:
    """One table a setting, the tables over settings, and the notes."""
    parts: list[RenderableType] = [apart(_table(result, setting)) for setting in result.settings]
    parts += section_tables(result)
    parts += [Text(f"note: {note}", style="yellow") for note in result.notes]
    return Group(*parts)


def _table(result: EvalResult, setting: Setting) -> Table:
    entries = result.of(setting)
    asked = next((entry.requests for entry in entries), 0)
    table = table_of_drafts(
        f"{result.suite['name']} · {result.target} · {setting} · {asked} prompts",
        "tau: tokens a round. alpha: acceptance by depth. speed-up: decode tokens/s over no draft. "
        "of max: of what an engine without overhead would reach. Ranges: 95 % intervals over prompts.",
    )
    for name in _COLUMNS:
        # A narrow terminal folds the list of depths.
        if name == "alpha by depth":
            table.add_column("alpha\nby depth", min_width=9)
        else:
            table.add_column(name, no_wrap=True)
    for entry in entries:
        table.add_row(*_cells(entry), style="dim" if entry.draft == BASELINE else "")
    return table


def _cells(entry: DraftResult) -> Iterator[str]:
    acceptance, speed = entry.acceptance, entry.speed
    yield text.label(entry)
    yield _stacked(text.number(acceptance.tau), acceptance.tau_ci)
    yield text.percent(acceptance.acceptance_rate)
    yield " ".join(text.number(value) for value in acceptance.alpha) or text.MISSING
    yield text.number(text.tokens_per_second(entry), 1)
    if entry.draft == BASELINE:
        yield "1.00x"
    else:
        yield _stacked(text.speedup(speed), speed.speedup_ci if speed else None)
    yield text.percent(speed.of_ceiling if speed else None, 0)
    yield text.percent(entry.exact.rate if entry.exact else None)


def _stacked(figure: str, ends: Interval | None) -> str:
    return f"{figure}\n{text.span(ends)}" if ends else figure
