from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drafttrain.bench.journal import UNFINISHED, Journal
from drafttrain.bench.result import Setting
from drafttrain.bench.runner import Contender, SuiteRun, run_suite
from drafttrain.engine.proposers import NGramProposer
from drafttrain.targets.model import TargetModel
from tests.unit.bench.test_runner import PROMPTS, suite, target

__all__ = ["target"]  # a fixture

KEY = {"suite": {"k": [2, 3]}, "versions": {"torch": "1"}}


def measure(target: TargetModel, journal: Journal | None, stop_at: str = "nothing") -> SuiteRun:
    """Two settings of a small suite, interrupted when a setting of that name begins."""

    def progress(what: str, done: int, total: int) -> None:
        if what.startswith(stop_at):
            raise KeyboardInterrupt

    contenders = [Contender("n", "ngram", NGramProposer())]
    return run_suite(target, suite(k=[2, 3], texts=2), PROMPTS, contenders, progress, journal=journal)


def test_an_interrupted_eval_goes_on_with_what_it_has(target: TargetModel, tmp_path: Path) -> None:
    folder = tmp_path / UNFINISHED
    with pytest.raises(KeyboardInterrupt):
        measure(target, Journal(folder, KEY), stop_at="K=3")
    journal = Journal(folder, KEY)
    (kept,) = journal.kept.values()
    assert kept.setting == Setting(2, 0.0, 1) and journal.differs == []
    resumed = measure(target, journal, stop_at="K=2")
    assert resumed.drafts[:2] == kept.drafts
    assert resumed.records[kept.setting, "n"] == kept.records["n"]
    assert resumed.texts == kept.texts != []
    assert any("before an interruption" in note for note in resumed.notes)
    # Greedy rounds do not depend on when they were run.
    whole = measure(target, None)
    assert [(e.draft, e.setting, e.acceptance) for e in resumed.drafts] == [
        (e.draft, e.setting, e.acceptance) for e in whole.drafts
    ]
    assert list(resumed.records) == list(whole.records)


@pytest.mark.parametrize("change", [{"versions": {"torch": "2"}}, {"suite": {"k": [2]}}])
def test_another_key_finds_nothing_and_leaves_nothing(
    target: TargetModel, tmp_path: Path, change: dict[str, Any]
) -> None:
    folder = tmp_path / UNFINISHED
    with pytest.raises(KeyboardInterrupt):
        measure(target, Journal(folder, KEY), stop_at="K=3")
    other = Journal(folder, {**KEY, **change})
    assert other.kept == {} and other.differs == list(change)
    assert Journal(folder, KEY).kept == {}


def test_fresh_measures_again(target: TargetModel, tmp_path: Path) -> None:
    measure(target, Journal(tmp_path, KEY))
    assert len(Journal(tmp_path, KEY).kept) == 2
    assert Journal(tmp_path, KEY, fresh=True).kept == {}
    assert Journal(tmp_path, KEY).kept == {}


def test_a_file_of_another_form_is_no_measurement(target: TargetModel, tmp_path: Path) -> None:
    measure(target, Journal(tmp_path, KEY))
    file = next(path for path in tmp_path.iterdir() if path.name.startswith("k3"))
    value = json.loads(file.read_text("utf-8"))
    del value["drafts"][0]["acceptance"]["tau"]
    file.write_text(json.dumps(value), "utf-8")
    journal = Journal(tmp_path, KEY)
    assert journal.kept == {} and journal.differs == ["format"]


def test_memory_is_what_the_engine_holds(target: TargetModel) -> None:
    """The plain engine's own, and of a draft what comes on top: two places behind the last token, for which there is
    room in what the cache is rounded up to."""
    plain, ngram, *_ = measure(target, None).drafts
    assert plain.memory is not None and ngram.memory is not None
    assert plain.memory.weights == sum(p.numel() * p.element_size() for p in target.parameters())
    assert ngram.memory == replace(plain.memory, weights=0, state=0)
    assert plain.memory.length == target.cache_length(plain.memory.length)
