from __future__ import annotations

from itertools import pairwise

import pytest

from drafttrain.errors import RecipeError
from drafttrain.recipe.training_config import TrainingConfig
from drafttrain.training.schedule import learning_rate, require_rest_of_warmup


def rates(total: int, **values: object) -> list[float]:
    config = TrainingConfig(max_steps=total, lr=1.0, **values)  # type: ignore[arg-type]
    return [learning_rate(step, total, config) for step in range(total)]


def test_warmup_is_linear_and_ends_at_the_peak() -> None:
    assert rates(20, schedule="constant", warmup=4)[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates(20, schedule="constant", warmup=0.2)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_wsd_is_flat_then_falls_to_the_end() -> None:
    found = rates(10, schedule="wsd", warmup=0.0, decay_fraction=0.4, min_lr=0.2)
    assert found[:7] == [1.0] * 7
    assert found[7:] == pytest.approx([0.8, 0.6, 0.4])
    # The step after the last would have exactly min_lr.
    config = TrainingConfig(max_steps=10, lr=1.0, schedule="wsd", warmup=0.0, decay_fraction=0.4, min_lr=0.2)
    assert learning_rate(10, 10, config) == pytest.approx(0.2)


def test_cosine_falls_from_peak_to_minimum() -> None:
    found = rates(100, schedule="cosine", warmup=10, min_lr=0.1)
    assert found[10] == 1.0
    assert all(after < before for before, after in pairwise(found[10:]))
    assert found[55] == pytest.approx(0.55)
    assert found[-1] == pytest.approx(0.1, abs=1e-3)


@pytest.mark.parametrize("schedule", ["wsd", "cosine", "constant"])
@pytest.mark.parametrize("total", [1, 2, 3])
def test_the_shortest_runs_have_a_rate(schedule: str, total: int) -> None:
    assert all(0 < rate <= 1 for rate in rates(total, schedule=schedule, warmup=0.02))


def test_a_warmup_as_long_as_the_epochs_turn_out_is_refused() -> None:
    steps = TrainingConfig(epochs=2, warmup=100)
    with pytest.raises(RecipeError, match="100 steps leaves nothing of the run, which has 100"):
        require_rest_of_warmup(steps, 100)
    require_rest_of_warmup(steps, 101)
    require_rest_of_warmup(TrainingConfig(epochs=2, warmup=0.9), 1)
