from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from drafttrain.files import write_json
from drafttrain.training import heartbeat
from drafttrain.training.heartbeat import FAILED, FOLDER, Heartbeat


class Ended(Exception):
    """Stands for the end of the process."""


def end(status: int) -> None:
    assert status == FAILED
    raise Ended


def watch(folder: Path, rank: int, count: int, said: list[str], patience: float | None = 100.0) -> Heartbeat:
    beat = Heartbeat(folder, "launch", rank, count, patience_s=patience, tell=said.append, end=end)
    beat.beat()
    return beat


def other(folder: Path, mine: Heartbeat, **changes: object) -> None:
    life = replace(mine.life, **{"time": time.time(), **changes})  # type: ignore[arg-type]
    write_json(folder / FOLDER / f"rank-{life.rank:05d}.json", asdict(life))


def _gone() -> int:
    """Number of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_beat_says_where_a_rank_stands(tmp_path: Path) -> None:
    with Heartbeat(tmp_path, "launch", 3, 4, patience_s=None, tell=pytest.fail) as beat:
        beat.at(17, 2, "update")
        beat.beat()
        (life,) = beat.lives()
        assert (life.rank, life.step, life.stage, life.pid, life.ended) == (3, 17, "update", os.getpid(), False)
    assert beat.lives()[0].ended


def test_an_error_is_left_behind(tmp_path: Path) -> None:
    beat = Heartbeat(tmp_path, "launch", 0, 1, patience_s=None, tell=pytest.fail)
    with pytest.raises(ValueError, match="broken"), beat:
        raise ValueError("broken\nand more")
    assert beat.lives()[0].failed == "broken"


def test_a_dead_rank_is_named_by_the_lowest_that_lives(tmp_path: Path) -> None:
    gone = _gone()
    said: list[str] = []
    beat = watch(tmp_path, 1, 3, said)
    other(tmp_path, beat, rank=0)
    other(tmp_path, beat, rank=2, pid=gone, step=41, stage="draft on micro-batch 0")
    other_process = replace(beat.life, rank=0, pid=os.getppid(), time=time.time())
    write_json(tmp_path / FOLDER / "rank-00000.json", asdict(other_process))
    beat._stopped.set()
    with pytest.raises(Ended):
        beat._judge()
    assert said == []  # rank 0 lives, and speaks
    lowest = watch(tmp_path, 0, 3, said)
    with pytest.raises(Ended):
        lowest._judge()
    assert len(said) == 1 and f"process {gone}) died at step 42 (draft on micro-batch 0)" in said[0]


@dataclass
class Clocks:
    """Of this host: the time of day, which can be set, and the seconds that pass."""

    day: float = 1e9
    passed: float = 0.0

    def time(self) -> float:
        return self.day

    def monotonic(self) -> float:
        return self.passed


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    found = Clocks()
    monkeypatch.setattr(heartbeat, "time", found)
    return found


def test_a_rank_on_a_silent_host_is_dead_whatever_the_clocks_say(tmp_path: Path, clocks: Clocks) -> None:
    said: list[str] = []
    beat = watch(tmp_path, 0, 2, said, patience=None)
    theirs: dict[str, object] = {
        "rank": 1,
        "host": "another-host",
        "machine": "another",
        "time": 5e8,
        "beats": 0,
    }  # years behind
    for beats in range(1, 31):
        clocks.passed += 10
        clocks.day += 3600  # set forward, again and again
        other(tmp_path, beat, **{**theirs, "beats": beats})
        beat._judge()
    clocks.passed += 80
    beat._judge()
    theirs["beats"] = 30
    other(tmp_path, beat, **theirs, ended=True)
    clocks.passed += 11
    beat._judge()
    assert said == []
    other(tmp_path, beat, **theirs, step=4, stage="update")
    with pytest.raises(Ended):
        beat._judge()
    assert len(said) == 1 and "rank 1 (host another-host" in said[0] and "died at step 5 (update)" in said[0]


def test_a_silence_is_counted_from_the_first_look(tmp_path: Path, clocks: Clocks) -> None:
    beat = watch(tmp_path, 0, 2, [], patience=None)
    other(tmp_path, beat, rank=1, machine="another", time=clocks.day - 1000)
    clocks.passed += 1000
    beat._judge()
    clocks.passed += 91
    with pytest.raises(Ended):
        beat._judge()


def test_no_rank_hangs_because_a_clock_was_set(tmp_path: Path, clocks: Clocks) -> None:
    said: list[str] = []
    beat = watch(tmp_path, 0, 2, said, patience=60.0)
    beat.at(1, 0, "update")
    beat.beat()
    other(tmp_path, beat, rank=1, idle_s=1.0, step=0, beats=1)
    clocks.day += 10_000
    beat._judge()
    assert said == []
    # A process that is stopped writes no more, and does not get on.
    clocks.passed += 58
    other(tmp_path, beat, rank=1, idle_s=1.0, step=0, beats=2)
    beat._judge()
    clocks.passed += 59
    beat._stopped.set()
    with pytest.raises(Ended):
        beat._judge()


def test_a_rank_that_spoke_is_not_repeated(tmp_path: Path) -> None:
    said: list[str] = []
    beat = watch(tmp_path, 0, 2, said)
    other(tmp_path, beat, rank=1, failed="the loss is NaN")
    with pytest.raises(Ended):
        beat._judge()
    assert said == []


def test_a_straggler_names_itself(tmp_path: Path) -> None:
    said: list[str] = []
    beat = watch(tmp_path, 1, 2, said, patience=60.0)
    beat.at(7, 0, "features of micro-batch 0")
    beat._moved -= 100
    beat.beat()
    other(tmp_path, beat, rank=0, order=1, stage="draft on micro-batch 0", idle_s=99.0)
    with pytest.raises(Ended):
        beat._judge()
    assert len(said) == 1 and "rank 1" in said[0] and "has not moved for 100 s at step 8 (features" in said[0]


def test_a_rank_that_prepares_may_take_longer_than_patience(tmp_path: Path, clocks: Clocks) -> None:
    said: list[str] = []
    waiting = watch(tmp_path, 1, 2, said, patience=60.0)
    clocks.passed += 7200
    other(tmp_path, waiting, rank=0, stage="preparing", idle_s=7200.0)
    waiting._judge()
    waiting.at(0, 0, "starting to train")  # the other one still prepares
    waiting.beat()
    clocks.passed += 7200
    waiting._judge()
    assert said == []
    other(tmp_path, waiting, rank=0, stage="preparing", pid=_gone())
    with pytest.raises(Ended):
        waiting._judge()
    assert len(said) == 1 and "died at step 1 (preparing)" in said[0]


def test_containers_that_share_a_name_do_not_share_processes(tmp_path: Path) -> None:
    beat = watch(tmp_path, 0, 2, [], patience=None)
    other(tmp_path, beat, rank=1, machine="another", pid=_gone())
    beat._judge()


def test_patience_waits_and_other_launches_do_not_count(tmp_path: Path) -> None:
    said: list[str] = []
    beat = watch(tmp_path, 0, 2, said, patience=None)
    beat._moved -= 10_000
    other(tmp_path, beat, rank=1, launch="an earlier one", failed="long ago")
    beat._judge()
    assert said == []
