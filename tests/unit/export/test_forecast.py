"""The forecast: rates of a chain in each engine's own definition, from rounds that are counted by hand."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from drafttrain.bench.metrics import acceptance
from drafttrain.engine.records import RoundRecord
from drafttrain.export.forecast import Forecast, describe, forecast
from drafttrain.export.measured import Evidence, Measurement
from drafttrain.export.prove.bundled import server_counts
from drafttrain.files import write_json

ROW = Measurement(
    suite="core",
    k=3,
    temperature=0.0,
    batch=1,
    tau=2.5,
    tau_ci=(2.4, 2.6),
    alpha=[0.8, 0.5, 0.25],
    per_position=[0.8, 0.4, 0.1],
    acceptance_rate=0.4333,
    speedup=1.5,
    speedup_ci=(1.4, 1.6),
    hardware="CPU",
    date="2026-11-30T00:00:00",
    chain_ci=[(1.75, 1.85), (2.1, 2.3), (2.2, 2.4)],
)


def expected(rows: list[Measurement], k: int, in_training: dict[str, object] | None = None) -> Forecast:
    found = forecast(rows, in_training, k)
    assert found is not None
    return found


def test_rounds_of_three_two_one_and_none(tmp_path: Path) -> None:
    """Case 33 of docs/cases.md: 1.5 accepted, 2.5 with the bonus token, as a server counts."""
    records = [RoundRecord("a", 0, i, 3, kept, kept + 1, None, 1, 0.0, 0.0, 0.0) for i, kept in enumerate((3, 2, 1, 0))]
    row = {
        "draft": "tiny",
        "setting": {"k": 3, "temperature": 0.0, "batch": 1},
        "acceptance": asdict(acceptance(records, samples=10)),
        "speed": None,
    }
    (tmp_path / "eval" / "core").mkdir(parents=True)
    result = {"suite": {"name": "core"}, "drafts": [row], "hardware": "h", "date": "2026-11-30"}
    write_json(tmp_path / "eval" / "core" / "result.json", result)
    found = expected(Evidence.of(tmp_path, {"recipe": "tiny"}, "w").rows, 3)
    counters = server_counts(records, 3, {"a": 100})
    assert found.length == counters.mean_length == 2.5
    assert found.unconditional == pytest.approx([n / counters.drafts for n in counters.per_position])
    assert found.unconditional == pytest.approx([0.75, 0.5, 0.25])
    assert found.conditional == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert found.rate == pytest.approx(counters.accepted / counters.proposed) == 0.5
    assert json.loads(json.dumps(found.to_json()))["k"] == 3


def test_fewer_tokens_than_were_measured_are_the_first_depths() -> None:
    found = expected([ROW], 2)
    assert found.unconditional == pytest.approx([0.8, 0.4]) and found.length == pytest.approx(2.2)
    # Of as many draft tokens, and by the same estimator: tau, 2.5 [2.4, 2.6] here, is another.
    assert found.length_interval == (2.1, 2.3)
    assert expected([ROW], 3).length_interval == (2.2, 2.4)
    assert expected([replace(ROW, chain_ci=[])], 3).length_interval is None  # of results from before they were kept


def test_the_point_lies_in_its_interval_however_short_the_answers(tmp_path: Path) -> None:
    """Answers of four tokens: tau is cut at their ends, what a server counts is not."""
    generator = random.Random(1)
    records = []
    for request in range(40):
        for number, reason in enumerate((None, "length")):
            kept = generator.choice((0, 1, 3, 4, 4))
            emitted = kept + 1 if reason is None else min(kept, 2)
            records.append(RoundRecord(f"r{request}", 0, number, 4, kept, emitted, reason, 1, 0.0, 0.0, 0.0))
    measured = acceptance(records)
    row = {
        "draft": "tiny",
        "setting": {"k": 4, "temperature": 0.0, "batch": 1},
        "acceptance": asdict(measured),
        "speed": None,
    }
    (tmp_path / "eval" / "core").mkdir(parents=True)
    result = {"suite": {"name": "core"}, "drafts": [row], "hardware": "h", "date": "2026-11-30"}
    write_json(tmp_path / "eval" / "core" / "result.json", result)
    for k in (1, 2, 3, 4):
        found = expected(Evidence.of(tmp_path, {"recipe": "tiny"}, "w").rows, k)
        assert found.length_interval is not None
        low, high = found.length_interval
        assert found.length == pytest.approx(measured.chain[k - 1]) and low <= found.length <= high
    assert measured.tau_ci is not None and not measured.tau_ci[0] <= found.length <= measured.tau_ci[1]


def test_more_than_were_measured_are_not_guessed() -> None:
    found = expected([ROW], 5)
    assert found.k == 3 and found.length == pytest.approx(1 + 0.8 + 0.4 + 0.1)
    assert "with 3 draft tokens" in describe(found, "vllm")[0]


def test_which_row_is_taken() -> None:
    warm = replace(ROW, temperature=1.0, k=4, alpha=[0.1])
    longer = replace(ROW, k=6, alpha=[0.5] * 6)
    wide = replace(ROW, batch=8, speedup=0.9, speedup_ci=None)
    assert expected([warm, ROW, longer], 3).conditional == [0.8, 0.5, 0.25]
    assert expected([warm, ROW, longer], 4).k == 4  # of the longer one
    assert [(s.batch, s.speedup) for s in expected([wide, ROW, longer], 3).speedups] == [(1, 1.5), (8, 0.9)]


def test_each_engine_in_its_own_words() -> None:
    found = expected([ROW], 3)
    assert found.counters("vllm") == {
        "mean acceptance length": 2.3,
        "per-position acceptance rate": [0.8, 0.4, 0.1],
        "draft acceptance rate": 0.4333,
    }
    # Its rate depends on the tree: only the length is comparable.
    assert found.counters("sglang") == {"accept length": 2.3}
    assert set(found.counters("trtllm")) == {"acceptance length", "acceptance rate"}
    assert found.counters("hf") == {}
    lines = describe(found, "vllm")
    assert lines[0].startswith("expect 2.30 [2.20, 2.40] tokens a round with 3 draft tokens (suite core, T=0, K=3")
    assert "per-position acceptance rate 0.800 / 0.400 / 0.100" in lines[2]
    assert lines[3] == "speed-up at batch 1: 1.50 [1.40, 1.60] in drafttrain's own engine"


def test_a_draft_that_was_only_trained() -> None:
    found = expected([], 2, {"alpha": [0.5, 0.5, 0.0], "k": 3, "tau": 1.7, "step": 9})
    assert found.unconditional == [0.5, 0.25] and "while training" in found.source and found.speedups == []
    assert forecast([], None, 3) is None
    assert forecast([], {"alpha": [], "k": 3}, 3) is None
    # Training notes 0 where no round came to a depth; one that is never accepted has been reached.
    unreached = expected([], 4, {"alpha": [0.5, 0.0, 0.0, 0.0], "k": 4})
    assert unreached.conditional == [0.5, 0.0, None, None] and unreached.unconditional == [0.5, 0.0, 0.0, 0.0]
    assert "0.50 / 0.00 / - / - of those that reached it" in describe(unreached, "vllm")[1]


def test_a_depth_that_no_round_reached() -> None:
    found = expected([replace(ROW, alpha=[0.0, None, None], per_position=[0.0, 0.0, 0.0])], 3)
    assert found.unconditional == [0.0, 0.0, 0.0] and found.length == 1.0
    assert "0.00 / - / -" in describe(found, "vllm")[1]
