"""Batches made ahead change nothing but the time: the same bits from every source, through kills, signals, guards."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.errors import DataError
from drafttrain.features.client import Wanted
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.stream import StreamedFeatures
from drafttrain.training.trainer import Trainer
from tests.integration.test_feature_sources import DATA, TARGET, both_of, serving, source_of
from tests.integration.test_guard import FLAT, SPIKE, trained
from tests.integration.test_train_invariants import make, run, weights
from tests.launching import finish, start_ranks
from tests.tiny_trainer import Recorder
from tests.tiny_training import Spoiled

STABLE = ("kind", "step", "epoch", "loss", "accuracy", "lr", "grad_norm", "tokens", "dropped")
KINDS = ("online", "offline", "fp8", "hybrid", "stream")


def curve(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: record.get(key) for key in STABLE} for record in records]


def same_bits(ours: Trainer, theirs: Trainer) -> None:
    first, second = weights(ours), weights(theirs)
    assert first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def no_thread() -> bool:
    return not any(thread.name == "prefetch" for thread in threading.enumerate())


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_from_every_source(tmp_path: Path, kind: str) -> None:
    """Thirteen steps of up to three micro-batches, over the end of an epoch, whose last step is a partial one."""
    found = {}
    for ahead in (0, 2):
        options: dict[str, Any] = {"batch_rows": 2, "accumulation": 3, "max_steps": 13, "prefetch": ahead}
        trainer = make(tmp_path / f"run-{ahead}", "eagle3", DATA, **options)
        assert trainer.ahead == ahead
        if kind == "online":
            found[ahead] = trainer, run(trainer)
        else:
            with source_of(kind, trainer.drafter.feature_spec, tmp_path / f"{kind}-{ahead}") as source:
                trainer.source = source
                found[ahead] = trainer, run(trainer)
        assert no_thread()
    assert {record["epoch"] for record in found[0][1]} == {0, 1, 2, 3}
    assert curve(found[2][1]) == curve(found[0][1])
    same_bits(found[2][0], found[0][0])


@pytest.mark.parametrize("family", ["eagle1-noise", "draft_lm"])
def test_random_numbers_of_the_draft_are_its_own(tmp_path: Path, family: str) -> None:
    """The target runs while the draft draws them, and while it runs the same code of transformers."""
    plain, ahead = (make(tmp_path / str(n), family, DATA, max_steps=8, prefetch=n) for n in (0, 3))
    assert curve(run(ahead)) == curve(run(plain))
    same_bits(ahead, plain)


def test_what_the_loop_waited_for_is_told_from_what_the_target_took(tmp_path: Path) -> None:
    seen = {n: run(make(tmp_path / str(n), max_steps=3, prefetch=n, data=DATA))[-1] for n in (0, 2)}
    for record in seen.values():
        assert record["target_s"] > 0 and record["data_s"] >= 0 and record["other_s"] >= 0
    whole = seen[0]["seconds_per_step"]
    parts = sum(seen[0][name] for name in ("data_s", "target_s", "draft_s", "other_s"))
    assert parts == pytest.approx(whole)
    # Made ahead, the target's time lies beside the rest.
    parts = sum(seen[2][name] for name in ("data_s", "draft_s", "other_s"))
    assert parts == pytest.approx(seen[2]["seconds_per_step"])


class _Killed(BaseException):
    pass


def at_step(step: int, act: Callable[[], Any]) -> Recorder:
    """A listener that acts when a step is logged."""
    recorder = Recorder()
    keep = recorder.on_record

    def on_record(record: dict[str, Any]) -> None:
        keep(record)
        if record["step"] == step:
            act()

    recorder.on_record = on_record  # type: ignore[method-assign]
    return recorder


def kill() -> None:
    raise _Killed


def ask_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("act", [kill, ask_to_stop])
@pytest.mark.parametrize("again", [0, 2])
def test_a_run_that_was_ended_goes_on_with_the_curve_of_an_unbroken_one(
    tmp_path: Path, act: Callable[[], Any], again: int
) -> None:
    options: dict[str, Any] = {"max_steps": 14, "save_every": 3, "data": DATA}
    unbroken = make(tmp_path / "a", **options)
    whole = run(unbroken)
    first, recorder = make(tmp_path / "b", prefetch=2, **options), at_step(5, act)
    if act is kill:
        with pytest.raises(_Killed):
            first.fit([recorder])
    else:
        result = first.fit([recorder])
        assert not result.finished and result.state.step == 5
    assert no_thread()
    second = make(tmp_path / "b", prefetch=again, **options)
    second.restore("auto")
    done = 3 if act is kill else 5
    assert second.state.step == done
    assert curve([*recorder.records[:done], *run(second)]) == curve(whole)
    same_bits(second, unbroken)


@pytest.mark.parametrize(
    "values",
    [
        {"guard": {"non_finite": "skip"}, "bad": (3, 4)},
        {"guard": {"non_finite": "rollback"}, "save_every": 2, "bad": (4, 5)},
        {"guard": SPIKE, "save_every": 3},
    ],
    ids=["skip", "rollback", "spike"],
)
def test_a_guard_decides_alike(tmp_path: Path, values: dict[str, Any]) -> None:
    (plain, theirs), (ahead, ours) = (trained(tmp_path / str(n), 8, prefetch=n, **values) for n in (0, 2))
    assert any(record["kind"] == "guard" for record in theirs)
    assert curve(ours) == curve(theirs)
    same_bits(ahead, plain)


def test_an_error_of_the_source_ends_the_run_at_its_step(tmp_path: Path) -> None:
    told = {}
    for ahead in (0, 3):
        trainer = make(tmp_path / str(ahead), max_steps=8, prefetch=ahead, data=DATA)
        windows = trainer.order.windows()
        name = [next(windows) for _ in range(5)][-1].rows[0][0].id
        trainer.source = _Broken(trainer.source, {name}, math.nan)  # type: ignore[assignment]
        recorder = Recorder()
        with pytest.raises(DataError) as caught:
            trainer.fit([recorder])
        assert [record["step"] for record in recorder.records] == [1, 2, 3, 4] and no_thread()
        told[ahead] = str(caught.value), curve(recorder.records)
    assert told[3] == told[0]


class _Broken(Spoiled):
    """A source that refuses some samples."""

    def batch(self, rows: Any, device: torch.device) -> Any:
        for row in rows:
            for sample in row:
                if sample.id in self.names:
                    raise DataError("has NaN features", where=f"sample {sample.id}", remedy="remove it")
        return super().batch(rows, device)


def test_a_failure_of_the_draft_is_not_held_up_by_a_server_that_is_waited_for(tmp_path: Path) -> None:
    trainer = make(tmp_path, "eagle3", DATA, max_steps=8, prefetch=2)
    said: list[str] = []
    with serving() as server:
        config = FeaturesConfig(source="stream", urls=(server.url,), on_loss="wait")
        wanted = Wanted(trainer.drafter.feature_spec, TARGET, "float32", say=said.append)
        source = StreamedFeatures(config, "token", wanted)
        trainer.source = source

        def break_off() -> None:
            deadline = time.monotonic() + 60
            while not said:  # the thread waits now
                assert time.monotonic() < deadline
                time.sleep(0.01)
            raise _Killed

        # Two batches may be there already when the server stops; a third is asked for in the next step.
        recorder = at_step(3, break_off)
        recorder.on_record = both_of(recorder.on_record, lambda record: record["step"] == 2 and server.stop())  # type: ignore[method-assign]
        with pytest.raises(_Killed):
            trainer.fit([recorder])
    began = time.monotonic()
    assert no_thread()
    source.close()
    assert time.monotonic() - began < 5


def jobs() -> list[dict[str, Any]]:
    """Each strategy without and with batches made ahead; one sample gives NaN, and the last step of an epoch is
    partial."""
    found = []
    for launch in (("replicated",), ("fsdp2",)):
        for ahead in (0, 2):
            job = {**FLAT, "family": "eagle3", "max_steps": 9, "save_every": 2, "accumulation": 2, "documents": 21}
            job |= {"guard": {"non_finite": "rollback"}, "spoil": [["s3"], math.nan], "prefetch": ahead}
            found.append({**job, "launch": launch, "folder": f"{launch[0]}-{ahead}"})
    return found


@pytest.mark.slow
def test_two_ranks_train_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_text(json.dumps(jobs()))
    done = finish(start_ranks(["-m", "tests.rank_worker", f"{tmp_path}/jobs.json", f"{tmp_path}/out.json"], 2))
    assert [status for status, _ in done] == [0, 0], "".join(output for _, output in done)
    plain, ahead, plain_shards, ahead_shards = json.loads((tmp_path / "out.json").read_text())
    assert any(record["kind"] == "guard" for record in plain) and len(plain) == 9
    assert curve(ahead) == curve(plain) and curve(ahead_shards) == curve(plain_shards)
