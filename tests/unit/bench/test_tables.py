from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from drafttrain.bench.report import text
from drafttrain.bench.report.html import render_html
from drafttrain.bench.report.terminal import result_table
from drafttrain.bench.result import BASELINE, EvalResult, load_result
from drafttrain.bench.tables import TITLES, tables
from drafttrain.bench.training_cost import TrainingCost, training_cost
from drafttrain.errors import DataError, UserError

EAGLE, TREE = "eagle3-smollm2", "eagle3-smollm2 static 3x2"


def shown(result: EvalResult, width: int = 200) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result_table(result))
    return console.export_text()


def test_each_table_varies_one_thing(wide_evaluation: EvalResult) -> None:
    found = tables(wide_evaluation)
    (prompts,), (batches,), (drafts,), (variants,) = (
        found.prompt_length, found.batch, found.draft, found.variant,
    )  # fmt: skip
    assert prompts.columns == ["0–63", "64–99", "100+"] and sum(prompts.answers) == 40
    assert batches.columns == ["1", "8"] and [s.draft for s in batches.series] == [EAGLE, "ngram", "oracle", TREE]
    assert [(row.draft, row.variant) for row in variants.rows] == [
        (EAGLE, "K=4"), (EAGLE, "static 3x2"), (EAGLE, "K=2"),
        ("ngram", "K=4"), ("ngram", "K=2"), ("oracle", "K=4"), ("oracle", "K=2"),
    ]  # fmt: skip
    assert [row.draft for row in drafts.rows] == [EAGLE, "ngram", "oracle"]
    for row in drafts.rows:
        rivals = [r.cell.speedup or 0.0 for r in variants.rows if r.draft == row.draft]
        assert row.cell.speedup == max(rivals)
    assert list(found.missing) == ["output_length"]


def test_figures_are_those_of_the_settings(wide_evaluation: EvalResult) -> None:
    grid = tables(wide_evaluation).batch[0]
    for column, batch in enumerate((1, 8)):
        for series in grid.series:
            entry = next(
                e
                for e in wide_evaluation.drafts
                if e.draft == series.draft and (e.setting.batch, e.setting.k) == (batch, 4)
            )
            cell = series.cells[column]
            assert cell is not None and entry.speed is not None and cell.speedup == entry.speed.speedup


def test_a_single_value_is_left_out_with_how_to_get_more(evaluation: EvalResult) -> None:
    narrow = replace(
        evaluation, drafts=[replace(e, by_prompt=[]) for e in evaluation.drafts if e.draft in (BASELINE, EAGLE)]
    )
    missing = tables(narrow).missing
    assert list(missing) == list(TITLES)
    assert "batch=[1,8]" in missing["batch"] and "k=[" in missing["variant"] and "drafts=[" in missing["draft"]
    for page in (shown(narrow), render_html(narrow)):
        assert "add batch=[1,8]" in page


@pytest.mark.parametrize("width", [80, 200])
def test_the_terminal_shows_every_section_whole(wide_evaluation: EvalResult, width: int) -> None:
    page = shown(replace(wide_evaluation, training=TrainingCost(1793, 1_700_000, 0.62, "a processor")), width)
    assert "…" not in page
    for name, title in TITLES.items():
        assert (title in page) or name == "output_length"
    folded = " ".join(page.split())
    assert "1.7M" in folded and "37.2 MiB" in folded and "Predicted and measured" in folded


def test_memory_and_training_cost_are_said_or_unknown(wide_evaluation: EvalResult) -> None:
    (variants,) = tables(wide_evaluation).variant
    costs = {row.draft: text.trained(row) for row in variants.rows}
    assert costs == {EAGLE: "unknown", "ngram": "none", "oracle": "none"}
    known = replace(wide_evaluation, training=TrainingCost(1793, 1_700_000, 0.62, "8 x H100"))
    (variants,) = tables(known).variant
    assert {text.trained(r) for r in variants.rows if r.draft == EAGLE} == {"1.7M tokens, 0.62 h on 8 x H100"}
    assert text.added(variants.rows[0].memory) == "37.2 MiB + 293.0 KiB"


def test_training_cost_reads_what_a_run_writes(tmp_path: Path) -> None:
    assert training_cost(tmp_path) is None
    records = [
        {"kind": "train", "step": 10, "tokens": 900, "seconds_per_step": 36.0},
        {"kind": "eval", "step": 10, "tau": 2.0},
        {"kind": "train", "step": 13, "tokens": 100, "seconds_per_step": 120.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), "utf-8")
    assert training_cost(tmp_path) == TrainingCost(13, 1000, 0.2, "unknown hardware")
    launch = {"hardware": {"cpu": "c", "cores": 2, "gpus": ["H100", "H100"]}, "world_size": 2}
    (tmp_path / "provenance.json").write_text(json.dumps([launch]), "utf-8")
    cost = training_cost(tmp_path)
    assert cost is not None and cost.hardware == "2 x H100"


def test_a_result_is_read_as_it_was_written(wide_evaluation: EvalResult, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({**wide_evaluation.to_json(), "tables": asdict(tables(wide_evaluation))}), "utf-8")
    assert load_result(file) == replace(wide_evaluation, texts=[])


def test_a_result_of_another_version_is_refused(wide_evaluation: EvalResult, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({**wide_evaluation.to_json(), "schema": 1}), "utf-8")
    with pytest.raises(DataError, match=r"(?s)version 1.*measure again"):
        load_result(file)
    broken = wide_evaluation.to_json()
    broken["drafts"][0]["setting"] = {"k": "many"}
    file.write_text(json.dumps(broken), "utf-8")
    with pytest.raises(UserError, match=r"drafts\.0\.setting"):
        load_result(file)
