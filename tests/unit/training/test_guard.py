"""What the guard decides, from losses alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from drafttrain.recipe.training_config import GuardConfig, TrainingConfig
from drafttrain.training.guard import LossGuard


def guard(*losses: float, **values: Any) -> LossGuard:
    made = LossGuard(GuardConfig(**{"window": 4, "limit": 2, "spike_factor": 3.0, **values}))
    for loss in losses:
        made.taken(loss)
    return made


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_seen_in_loss_and_gradient(value: float) -> None:
    judge = guard()
    loss, norm = judge.of_loss(value), judge.of_norm(value)
    assert loss is not None and loss.kind == "loss" and norm is not None and norm.kind == "gradient"
    assert judge.of_loss(1e30) is None and judge.of_norm(1e30) is None
    assert judge.decide(loss) == ("stop", "")


def test_a_spike_is_measured_by_the_median_of_a_whole_window() -> None:
    assert guard(1, 1, 1, spike="skip").of_loss(100) is None
    judge = guard(9, 1, 1, 1, 50, spike="skip")
    assert judge.of_loss(2.9) is None
    spike = judge.of_loss(3.1)
    assert spike is not None and spike.kind == "spike" and "3.1" in spike.what
    assert guard(1, 1, 1, 1).of_loss(100) is None  # off unless asked for


def test_skips_are_limited_in_a_row() -> None:
    judge = guard(non_finite="skip")
    trouble = judge.of_loss(math.nan)
    assert trouble is not None
    assert [judge.decide(trouble)[0] for _ in range(2)] == ["skip", "skip"]
    judge.taken(1.0)
    decided = [judge.decide(trouble) for _ in range(3)]
    assert [action for action, _ in decided] == ["skip", "skip", "stop"]
    assert "training.guard.limit allows 2" in decided[-1][1] and judge.dropped == 5


def test_rollbacks_are_limited_for_each_checkpoint() -> None:
    judge = guard(non_finite="rollback")
    trouble = judge.of_norm(math.nan)
    assert trouble is not None
    for _ in range(2):
        assert judge.decide(trouble)[0] == "rollback"
        judge.taken(1.0)
    judge.saved()
    assert judge.decide(trouble)[0] == "rollback"
    judge.saved()  # of the same draft again: nothing new
    assert [judge.decide(trouble)[0] for _ in range(2)] == ["rollback", "stop"]


def test_a_guard_goes_on_from_a_checkpoint() -> None:
    first = guard(1, 2, 3, 4, spike="skip")
    first.decide(first.of_loss(100))  # type: ignore[arg-type]
    second = guard(spike="skip")
    second.load(first.to_json())
    assert second.to_json() == first.to_json() and second.of_loss(7.4) is None and second.of_loss(7.6) is not None
    second.recall({"recent": [10, 10, 10, 10]})
    assert second.of_loss(7.6) is None and second.dropped == 1


def test_a_rollback_without_checkpoints_is_refused() -> None:
    with pytest.raises(ValidationError, match="set save_every"):
        TrainingConfig.model_validate({"max_steps": 5, "save_every": None, "guard": {"spike": "rollback"}})
    TrainingConfig.model_validate({"max_steps": 5, "guard": {"spike": "rollback"}})
