"""Results that are kept: JSON lists of rows, rendered as a table and as a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.table import Table

from drafttrain.bench.bootstrap import Interval
from drafttrain.bench.report import text
from drafttrain.bench.result import BASELINE, EvalResult
from drafttrain.errors import DataError, UserError
from drafttrain.files import atomic_file, find_resource, read_json, write_json
from drafttrain.recipe.schema import REFERENCES

FOLDER = "eval/leaderboard"
PAGE = "README.md"
_HEAD = (
    "target",
    "draft",
    "family",
    "K",
    "T",
    "batch",
    "prompts",
    "tau",
    "accepted",
    "speed-up",
    "exact",
    "date",
)
# What a row does not show: with others than the suite's own it would stand beside rows that it does not compare with.
_UNSEEN = (
    "name",
    "prompts",
    "format",
    "limit",
    "max_new_tokens",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "stop",
    "typical",
    "compile",
    "on_device",
)
_INTRODUCTION = (
    "# Leaderboard",
    "",
    "Rendered by `drafttrain eval --leaderboard` from the JSON files beside this page;",
    "`drafttrain eval RUN --suite SUITE` adds to them, with the suite's own prompts and lengths.",
    "",
    "tau is pooled over rounds with the bonus token counted; the speed-up is decoding against the same engine",
    "without a draft, in the same run. 95 % bootstrap intervals over prompts in brackets. The n-gram and the",
    "oracle (which replays the answers: the most that K drafts can give) are references without training.",
    "",
)


@dataclass(frozen=True)
class Row:
    """One draft in one setting.

    Attributes:
        target, family, draft, recipe: names; recipe "" for references.
        k, temperature, batch: the setting.
        prompts: the prompt set and how many of it, such as "core (96)".
        tau, tau_ci, alpha, acceptance_rate: see `metrics.Acceptance`.
        speedup, speedup_ci: decoding; None where the measurement was no result.
        exact_match: share of greedy answers equal to those without a draft; None when sampled.
        hardware, versions, commit, date: where and when.
    """

    target: str
    family: str
    draft: str
    recipe: str
    k: int
    temperature: float
    batch: int
    prompts: str
    tau: float | None
    tau_ci: Interval | None
    alpha: list[float | None]
    acceptance_rate: float | None
    speedup: float | None
    speedup_ci: Interval | None
    exact_match: float | None
    hardware: str
    versions: dict[str, str]
    commit: str
    date: str


KEYS = tuple(field.name for field in fields(Row))


def rows_of(result: EvalResult) -> list[Row]:
    """The rows of an evaluation; the baseline, to which all are relative, is none."""
    return [
        Row(
            target=result.target,
            family=entry.family,
            draft=entry.draft,
            recipe="" if entry.family in REFERENCES else result.recipe,
            k=entry.setting.k,
            temperature=entry.setting.temperature,
            batch=entry.setting.batch,
            prompts=f"{result.suite['name']} ({entry.requests})",
            tau=_rounded(entry.acceptance.tau),
            tau_ci=_rounded_interval(entry.acceptance.tau_ci),
            alpha=[_rounded(value) for value in entry.acceptance.alpha],
            acceptance_rate=_rounded(entry.acceptance.acceptance_rate),
            speedup=_rounded(entry.speed.speedup) if entry.speed else None,
            speedup_ci=_rounded_interval(entry.speed.speedup_ci) if entry.speed else None,
            exact_match=_rounded(entry.exact.rate) if entry.exact else None,
            hardware=result.hardware,
            versions=result.versions,
            commit=result.commit,
            date=result.date,
        )
        for entry in result.drafts
        if entry.draft != BASELINE
    ]


def changed_unseen(overrides: Sequence[str]) -> list[str]:
    """Those of a suite's overrides that make its rows no result of the suite."""
    return [text for text in overrides if text.partition("=")[0].split(".")[0] in _UNSEEN]


def default_folder() -> Path:
    """`eval/leaderboard` of the working folder or the checkout, whichever exists; else of the working folder."""
    try:
        return find_resource(FOLDER)
    except UserError:
        return Path(FOLDER)


def write_rows(folder: Path, name: str, rows: Sequence[Row]) -> Path:
    """Write `<name>.json` (replacing an earlier run of that name) and the page."""
    file = folder / f"{name}.json"
    write_json(file, [asdict(row) for row in rows])
    write_page(folder)
    return file


def read_rows(folder: Path) -> list[Row]:
    """All rows of a folder, files in order of name.

    Raises:
        DataError: a file is no list of rows with exactly the keys `KEYS`.
    """
    rows: list[Row] = []
    for file in sorted(folder.glob("*.json")):
        content = read_json(file)
        if not isinstance(content, list):
            raise DataError("is not a list of rows", where=file)
        for number, value in enumerate(content, 1):
            rows.append(_row(value, number, file))
    return rows


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Rows that compare stand together, the highest tau first; of what was run again, the newest is kept."""
    newest: dict[tuple[Any, ...], Row] = {}
    for row in sorted(rows, key=lambda row: row.date):
        key = (row.target, row.draft, row.k, row.temperature, row.batch, row.prompts, row.hardware)
        newest[key] = row
    return sorted(
        newest.values(),
        key=lambda row: (row.target, row.prompts, row.temperature, row.batch, row.k, -(row.tau or 0.0)),
    )


def leaderboard_table(rows: Iterable[Row]) -> Table:
    """For the terminal."""
    table = Table(title="Leaderboard", title_justify="left", title_style="bold")
    for name in _HEAD:
        table.add_column(name)
    previous: tuple[Any, ...] | None = None
    for row in ranked(rows):
        group = (row.target, row.prompts, row.temperature, row.batch, row.k)
        if previous is not None and group != previous:
            table.add_section()
        previous = group
        table.add_row(*_cells(row))
    return table


def write_page(folder: Path) -> Path:
    """Render all rows of the folder as Markdown."""
    lines = [*_INTRODUCTION, f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"]
    rows = ranked(read_rows(folder))
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in _cells(row))} |" for row in rows]
    lines += ["", "Measured on:", ""]
    lines += [f"- {hardware}" for hardware in dict.fromkeys(_machine(row) for row in rows)] or ["- nothing yet"]
    page = folder / PAGE
    with atomic_file(page) as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return page


def _machine(row: Row) -> str:
    known = [f"{name} {row.versions[name]}" for name in ("torch", "transformers") if name in row.versions]
    return ", ".join([row.hardware, *known])


def _cells(row: Row) -> list[str]:
    return [
        row.target,
        row.draft,
        row.family,
        str(row.k),
        f"{row.temperature:g}",
        str(row.batch),
        row.prompts,
        text.with_interval(row.tau, row.tau_ci),
        text.percent(row.acceptance_rate),
        text.with_interval(row.speedup, row.speedup_ci, unit="x"),
        text.percent(row.exact_match),
        row.date[:10],
    ]


def _row(value: Any, number: int, file: Path) -> Row:
    if not isinstance(value, dict) or set(value) != set(KEYS):
        found = set(value) if isinstance(value, dict) else set()
        missing, unknown = sorted(set(KEYS) - found), sorted(found - set(KEYS))
        raise DataError(
            f"row {number}: missing {missing or 'nothing'}, unknown {unknown or 'nothing'}",
            where=file,
        )
    try:
        return TypeAdapter(Row).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(f"row {number}: {place}: {first['msg']}", where=file) from None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _rounded_interval(ends: Interval | None) -> Interval | None:
    return None if ends is None else (round(ends[0], 4), round(ends[1], 4))
