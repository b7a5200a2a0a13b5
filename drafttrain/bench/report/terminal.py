"""The result table of the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drafttrain.bench.report import text
from drafttrain.bench.result import BASELINE, DraftResult, EvalResult, Setting


def result_table(result: EvalResult) -> RenderableType:
    """One table a setting, and the notes."""
    parts: list[RenderableType] = [_table(result, setting) for setting in result.settings]
    parts += [Text(f"note: {note}", style="yellow") for note in result.notes]
    return Group(*parts)


def _table(result: EvalResult, setting: Setting) -> Table:
    entries = result.of(setting)
    drafted = next((e.requests for e in entries), 0)
    table = Table(
        title=f"{result.suite['name']} · {result.target} · {setting} · {drafted} prompts",
        title_justify="left",
        title_style="bold",
        caption="tau: tokens a round; alpha: acceptance by depth; speed-up: decode tokens/s over no draft; "
        "[95 % bootstrap interval over prompts]",
        caption_justify="left",
    )
    for name, justify in (
        ("draft", "left"),
        ("tau", "left"),
        ("accepted", "right"),
        ("alpha by depth", "left"),
        ("tokens/s", "right"),
        ("speed-up", "left"),
        ("end to end", "right"),
        ("of ceiling", "right"),
        ("exact", "right"),
    ):
        table.add_column(name, justify="right" if justify == "right" else "left", no_wrap=name != "speed-up")
    for entry in entries:
        table.add_row(*_cells(entry), style="dim" if entry.draft == BASELINE else "")
    return table


def _cells(entry: DraftResult) -> Iterator[str]:
    acceptance, speed = entry.acceptance, entry.speed
    yield text.label(entry)
    yield text.with_interval(acceptance.tau, acceptance.tau_ci)
    yield text.percent(acceptance.acceptance_rate)
    yield text.chain(acceptance.alpha)
    yield text.number(text.tokens_per_second(entry), 1)
    if entry.draft == BASELINE:
        yield "1.00x"
    else:
        yield f"{text.speedup(speed)} {text.interval(speed.speedup_ci) if speed else ''}".rstrip()
    yield text.number(speed.end_to_end if speed else None, 2, "x")
    yield text.percent(speed.of_ceiling if speed else None, 0)
    yield text.percent(entry.exact.rate if entry.exact else None)
