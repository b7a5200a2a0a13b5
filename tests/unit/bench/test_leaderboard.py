from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from drafttrain.bench.leaderboard import KEYS, leaderboard_table, ranked, read_rows, rows_of, write_rows
from drafttrain.bench.result import EvalResult
from drafttrain.errors import DataError


def test_rows_come_back_as_written(evaluation: EvalResult, tmp_path: Path) -> None:
    rows = rows_of(evaluation)
    file = write_rows(tmp_path, "core-run", rows)
    assert [tuple(row) for row in json.loads(file.read_text("utf-8"))] == [KEYS] * len(rows)
    again = read_rows(tmp_path)
    assert [asdict(row) for row in again] == [asdict(row) for row in rows]


def test_the_baseline_is_no_row_and_a_flagged_speedup_is_null(evaluation: EvalResult) -> None:
    rows = rows_of(evaluation)
    assert "none" not in {row.draft for row in rows}
    flagged = next(row for row in rows if row.draft == "ngram" and row.temperature == 1)
    assert flagged.speedup is None and flagged.speedup_ci is None and flagged.tau is not None
    assert flagged.exact_match is None and flagged.recipe == ""


def test_page_lists_all_rows(evaluation: EvalResult, tmp_path: Path) -> None:
    rows = rows_of(evaluation)
    write_rows(tmp_path, "core-run", rows)
    page = (tmp_path / "README.md").read_text("utf-8")
    assert sum(line.startswith("| smollm2") for line in page.splitlines()) == len(rows)
    assert "a processor (2 cores), torch 2.13.0, transformers 5.24.0" in page


def test_a_reference_measured_again_is_shown_once_with_its_newest_figures(evaluation: EvalResult) -> None:
    rows = rows_of(evaluation)
    newer = [replace(row, tau=9.0, date="2026-02-01T00:00:00+00:00") for row in rows if row.draft == "ngram"]
    shown = ranked([*newer, *rows])
    assert len(shown) == len(rows)
    assert {row.tau for row in shown if row.draft == "ngram"} == {9.0}


def test_better_drafts_stand_first_in_their_setting(evaluation: EvalResult) -> None:
    greedy = [row.tau or 0 for row in ranked(rows_of(evaluation)) if row.temperature == 0]
    assert greedy == sorted(greedy, reverse=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{}", "not a list"), ("[1]", "row 1"), ('[{"target": "x"}]', "missing"), ("[", "JSON")],
)
def test_foreign_files_are_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(Exception, match=message) as error:
        read_rows(tmp_path)
    assert "x.json" in str(error.value)


@pytest.mark.parametrize(("key", "value"), [("date", 5), ("tau", "x"), ("tau_ci", [1.0]), ("alpha", 1.0)])
def test_a_value_of_another_type_is_refused(evaluation: EvalResult, tmp_path: Path, key: str, value: object) -> None:
    row = asdict(rows_of(evaluation)[0]) | {key: value}
    (tmp_path / "x.json").write_text(json.dumps([row]))
    with pytest.raises(DataError, match=f"row 1: {key}"):
        read_rows(tmp_path)


def test_an_unknown_key_is_refused(evaluation: EvalResult, tmp_path: Path) -> None:
    row = asdict(rows_of(evaluation)[0]) | {"gpu": "x"}
    (tmp_path / "x.json").write_text(json.dumps([row]))
    with pytest.raises(DataError, match="unknown \\['gpu'\\]"):
        read_rows(tmp_path)


def test_table_renders(evaluation: EvalResult) -> None:
    console = Console(width=220, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(leaderboard_table(rows_of(evaluation)))
    assert "eagle3-smollm2" in console.export_text()
