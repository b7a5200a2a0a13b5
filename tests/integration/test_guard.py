"""Steps that would do harm are dropped, or the draft goes back; whatever the strategy, and through a resume."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.training.launch import Launch
from drafttrain.training.trainer import LossSpikeError, NonFiniteError, Trainer
from tests.launching import finish, start_ranks
from tests.rank_worker import make_trainer, run_job
from tests.tiny_trainer import Recorder
from tests.tiny_training import Spoiled

FLAT = {"schedule": "constant", "warmup": 0, "batch_rows": 2, "documents": 24}
# The first losses of this run are far apart: the fourth is 1.15 times the median of those before.
SPIKE = {"spike": "rollback", "spike_factor": 1.1, "window": 3, "limit": 9}
STRATEGIES: list[tuple[Any, ...]] = [("replicated",), ("fsdp2",)]
STRATEGIES += [("zero", stage) for stage in range(4)] if find_spec("deepspeed") else []


def trained(
    folder: Path, steps: int, bad: tuple[int, ...] = (), factor: float = math.nan, **values: Any
) -> tuple[Trainer, list[dict[str, Any]]]:
    """A run of `steps` in which the features of the steps `bad`, from 1, are multiplied by `factor`."""
    trainer = make_trainer(folder, Launch(), "eagle3", max_steps=steps, **{**FLAT, **values})
    trainer.source = Spoiled(trainer.source, names_of(trainer, bad), factor)  # type: ignore[assignment]
    trainer.restore("auto")
    recorder = Recorder()
    trainer.fit([recorder])
    return trainer, recorder.records


def names_of(trainer: Trainer, steps: tuple[int, ...]) -> list[str]:
    windows = trainer.order.windows()
    seen = [[sample.id for row in next(windows).rows for sample in row] for _ in range(max(steps, default=0))]
    return [name for step in steps for name in seen[step - 1]]


def assert_same_state(ours: Trainer, theirs: Trainer) -> None:
    first, second = ours.strategy.snapshot(True), theirs.strategy.snapshot(True)
    assert first is not None and second is not None and first.moments.keys() == second.moments.keys()
    for name, value in {**first.weights, **first.moments}.items():
        torch.testing.assert_close(value, {**second.weights, **second.moments}[name], rtol=0, atol=0)


def test_a_skipped_step_changes_nothing_and_is_counted(tmp_path: Path) -> None:
    ours, records = trained(tmp_path / "a", 3, bad=(3,), guard={"non_finite": "skip"})
    theirs, _ = trained(tmp_path / "b", 2)
    assert_same_state(ours, theirs)
    assert [(r["kind"], r["step"]) for r in records] == [("train", 1), ("train", 2), ("guard", 3)]
    assert records[-1]["action"] == "skip" and records[-1]["loss"] is None
    assert set(records[-1]["samples"].split(", ")) == set(names_of(ours, (3,)))
    assert (ours.state.step, ours.state.row, ours.guard.dropped) == (3, 6, 1)
    _, more = trained(tmp_path / "c", 4, bad=(3,), guard={"non_finite": "skip"})
    assert more[-1]["step"] == 4 and more[-1]["dropped"] == 1 and math.isfinite(more[-1]["loss"])


def test_a_rollback_goes_on_from_the_newest_checkpoint(tmp_path: Path) -> None:
    values = {"guard": {"non_finite": "rollback"}, "save_every": 2}
    ours, records = trained(tmp_path / "a", 4, bad=(4,), **values)
    theirs, _ = trained(tmp_path / "b", 2)
    assert_same_state(ours, theirs)
    assert records[-1]["kind"] == "guard" and records[-1]["to_step"] == 2
    # Before the first checkpoint of the recipe there is one of the draft's start.
    ours, records = trained(tmp_path / "c", 2, bad=(2,), **values)
    assert records[-1]["to_step"] == 0
    fresh = make_trainer(tmp_path / "d", Launch(), "eagle3", max_steps=2, **FLAT)
    assert_same_state(ours, fresh)


def test_a_run_that_starts_from_another_ones_checkpoint_can_roll_back_to_it(tmp_path: Path) -> None:
    values: dict[str, Any] = {"guard": {"non_finite": "rollback"}, "save_every": 4}
    first, _ = trained(tmp_path / "a", 2, save_every=2)
    trainer = make_trainer(tmp_path / "b", Launch(), "eagle3", max_steps=3, **FLAT, **values)
    trainer.source = Spoiled(trainer.source, names_of(trainer, (3,)), math.nan)  # type: ignore[assignment]
    trainer.restore(tmp_path / "a/checkpoints/step-00000002")
    recorder = Recorder()
    trainer.fit([recorder])
    assert [(r["step"], r["to_step"]) for r in recorder.records if r["kind"] == "guard"] == [(3, 2)]
    assert_same_state(trainer, first)


def test_a_guard_that_drops_too_much_stops(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"at step 5; training\.guard\.limit allows 2 dropped steps in a row"):
        trained(tmp_path / "a", 8, bad=(3, 4, 5), guard={"non_finite": "skip", "limit": 2})
    with pytest.raises(LossSpikeError, match="the median of the last 3 steps"):
        trained(tmp_path / "b", 5, guard={**SPIKE, "spike": "stop"})


def test_a_resumed_run_sees_the_spike_of_an_unbroken_one(tmp_path: Path) -> None:
    values: dict[str, Any] = {"guard": SPIKE, "save_every": 3}
    _, unbroken = trained(tmp_path / "a", 6, **values)
    trained(tmp_path / "b", 3, **values)
    _, rest = trained(tmp_path / "b", 6, **values)
    assert rest[0]["kind"] == "guard" and (rest[0]["step"], rest[0]["to_step"]) == (4, 3)
    for ours, theirs in zip(rest, unbroken[3:], strict=True):
        for key in ("kind", "step", "loss", *(("what", "to_step", "samples") if ours["kind"] == "guard" else ())):
            assert ours[key] == theirs[key]


def jobs() -> list[dict[str, Any]]:
    """Each strategy with one sample that gives NaN in step 3, before the recipe's first checkpoint, and one in 6."""
    common = {"family": "eagle3", "max_steps": 8, "save_every": 4, "accumulation": 2, "documents": 32, "packing": False}
    common |= {"schedule": "constant", "warmup": 0, "guard": {"non_finite": "rollback"}}
    one = make_trainer(Path("unused"), Launch(), **{**common, "batch_rows": 2})
    spoil = [[names_of(one, (step,))[0] for step in (3, 6)], math.nan]
    return [
        {**common, "batch_rows": 1, "spoil": spoil, "launch": launch, "folder": "-".join(map(str, launch))}
        for launch in STRATEGIES
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_decide_alike_under_every_strategy(tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_text(json.dumps(jobs()))
    done = finish(start_ranks(["-m", "tests.rank_worker", f"{tmp_path}/jobs.json", f"{tmp_path}/out.json"], 2))
    assert [status for status, _ in done] == [0, 0], "".join(output for _, output in done)
    results = json.loads((tmp_path / "out.json").read_text())
    alone = run_job(tmp_path / "alone", {**jobs()[0], "batch_rows": 2})
    assert [(r["step"], r["to_step"]) for r in alone if r["kind"] == "guard"] == [(3, 0), (6, 4)]
    for job, records in zip(jobs(), results, strict=True):
        for ours, theirs in zip(records, alone, strict=True):
            told = {key: theirs[key] for key in ("kind", "step", "action", "to_step", "tokens") if key in theirs}
            assert told == {key: ours[key] for key in told}, job["folder"]
            if theirs["loss"] is not None:
                assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-3), job["folder"]
