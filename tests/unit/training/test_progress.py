from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from drafttrain.cli.output import lasting_console
from drafttrain.errors import UserError
from drafttrain.files import read_jsonl
from drafttrain.recipe.training_config import TrackingConfig
from drafttrain.training.callbacks import require_tracker, tracker_id
from drafttrain.training.metrics import MetricsLog
from drafttrain.training.progress import ConsoleReporter, ProgressLine

TRAIN: dict[str, Any] = {
    "dropped": 0,
    "kind": "train",
    "step": 40,
    "loss": 2.5,
    "accuracy": [0.51, None],
    "tokens": 12345,
    "tokens_per_s": 1234.5,
    "data_s": 0.1,
    "target_s": 3.0,
    "draft_s": 6.5,
    "memory_mib": 2345.6,
    "seconds_per_step": 2.0,
}
EVAL: dict[str, Any] = {"kind": "eval", "step": 40, "tau": 1.861, "alpha": [0.6, 0.5], "k": 2, "best": True}


def shown(*, terminal: bool) -> str:
    out = io.StringIO()
    line = ProgressLine(Console(file=out, force_terminal=terminal, width=160), total_steps=100, step=30)
    line.on_record(TRAIN)
    line.on_record(EVAL)
    line.close()
    return out.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    first, second = shown(terminal=False).splitlines()
    shares = "data 1%  target 30%  draft 65%  2,346 MiB"
    assert first == f"step 40/100  loss 2.5000  acc 0.510 -  1,234 tok/s  ETA 0:02:00  {shares}"
    assert second == "step 40  acceptance length 1.861 at k=2 (by depth 0.60 0.50)  best so far"


def test_a_live_line_on_a_terminal() -> None:
    text = shown(terminal=True)
    assert "40/100" in text and "loss 2.5000" in text and "ETA 0:02:00" in text and "1.861" in text


def test_stages_report_and_other_ranks_are_quiet() -> None:
    out = io.StringIO()
    console = Console(file=out, width=40)
    loud, quiet = ConsoleReporter(console), ConsoleReporter(console, quiet=True)
    for reporter in (loud, quiet):
        reporter.say("a line that is longer than the console is wide, [/INST] and not broken")
        for done in range(1, 101):
            reporter.progress("answers", done, 100)
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("[/INST] and not broken")
    assert lines[-1].startswith("answers: 100/100") and len(lines) <= 4


def test_a_task_that_is_done_is_said_once() -> None:
    """The last batch of prompts that the target writes ends at the same count several times."""
    out = io.StringIO()
    reporter = ConsoleReporter(Console(file=out))
    for done in (8, 8, 8):
        reporter.progress("prompts", done, 8)
    assert out.getvalue().splitlines() == ["prompts: 8/8"]


def test_the_time_left_is_told_by_what_this_run_has_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """900 of 1000 answers are an earlier run's; ten more took a minute."""
    out, now = io.StringIO(), 0.0
    monkeypatch.setattr("drafttrain.training.progress.time.monotonic", lambda: now)
    reporter = ConsoleReporter(Console(file=out), every_s=0.0)
    for done, now in ((900, 100.0), (910, 160.0), (1000, 700.0)):  # noqa: B007  the clock reads it
        reporter.progress("answers", done, 1000)
    assert out.getvalue().splitlines() == [
        "answers: 900/1000",
        "answers: 910/1000  ETA 0:09:00",
        "answers: 1000/1000  ETA 0:00:00",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_reader_that_has_gone_does_not_end_a_run(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        console = lasting_console()
        console._force_terminal = terminal
        line = ProgressLine(console, total_steps=100)
        line.on_record(TRAIN)
        os.close(reader)
        line.on_record(TRAIN)
        line.on_record(EVAL)
        line.close()
        ConsoleReporter(console).say("done")


def test_without_a_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    ConsoleReporter(lasting_console()).say("unseen")


def test_the_log_drops_what_a_killed_run_wrote_after_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 0)
    for step in range(1, 6):
        log.on_record({"kind": "train", "step": step, "samples": "a\u2028b"})
    with path.open("a") as file:
        file.write('{"kind": "tra')
    MetricsLog(path, 3).on_record({"kind": "train", "step": 4, "again": True})
    assert [record["step"] for _, record in read_jsonl(path)] == [1, 2, 3, 4]


def test_a_tracker_knows_a_run_by_more_than_its_name(tmp_path: Path) -> None:
    """Two seeds of one recipe in folders of their own, and a fresh start in one of them, are three runs."""
    one, other = (tmp_path / name for name in ("a", "b"))
    ids = [tracker_id(folder, "mine", resumed=False) for folder in (one, other, other)]
    assert len({*ids, "mine"}) == 4 and all(found.startswith("mine-") for found in ids)
    assert tracker_id(one, "mine", resumed=True) == ids[0] and tracker_id(other, "mine", resumed=True) == ids[2]
    assert tracker_id(tmp_path / "older", "mine", resumed=True) == "mine"


def test_a_missing_tracker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafttrain.training.callbacks.find_spec", lambda name: None)
    require_tracker(TrackingConfig())
    with pytest.raises(UserError, match=r"drafttrain\[wandb\]"):
        require_tracker(TrackingConfig(wandb="offline"))
