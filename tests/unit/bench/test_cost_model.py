from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

from drafttrain.bench.cost_model import CostModel, RoundCost, cost_models, fit, paces
from drafttrain.bench.result import EvalResult, Setting
from drafttrain.bench.rounds import RoundTime


def timing(rows: int, width: int, noise: float = 0.0, rng: random.Random | None = None) -> RoundTime:
    """A machine whose costs are known."""
    factor = 1 + noise * (rng.uniform(-1, 1) if rng else 0)
    steps = width - 1
    verify = 0.04 + 0.002 * rows + 0.001 * rows * width
    draft = 0.001 + 0.002 * steps + 0.0001 * rows * steps
    return RoundTime(rows, width, steps, 50, 0, draft * factor, verify * factor, 0.0005 * factor)


def test_known_costs_are_found() -> None:
    sizes = list(product((1, 2, 4, 8), (2, 3, 5, 7)))
    cost = RoundCost.fit([timing(*size) for size in sizes])
    assert cost.verify == pytest.approx((0.04, 0.002, 0.001))
    assert cost.draft == pytest.approx((0.001, 0.0, 0.002, 0.0001))
    assert cost.host == pytest.approx((0.0005, 0.0))
    # A size that was never timed, and whether it is one between those that were.
    unseen = timing(6, 4)
    assert cost.seconds(6, 4, 3) == pytest.approx(unseen.draft_s + unseen.verify_s + unseen.host_s)
    assert cost.covers(6, 4) and not cost.covers(9, 4) and not cost.covers(6, 8)


def test_noise_moves_predictions_by_no_more_than_itself() -> None:
    rng = random.Random(0)
    sizes = list(product((1, 2, 4, 8), (2, 3, 5, 7)))
    cost = RoundCost.fit([timing(*size, 0.1, rng) for size in sizes])
    for rows, width in sizes:
        exact = timing(rows, width)
        truth = exact.draft_s + exact.verify_s + exact.host_s
        assert cost.seconds(rows, width, width - 1) == pytest.approx(truth, rel=0.1)


def test_what_never_varied_costs_nothing_and_nothing_is_negative() -> None:
    """One size gives a constant; times that fall with size give no negative slope."""
    assert fit([(1, 4, 8)], [0.5], [3]) == pytest.approx((0.5, 0.0, 0.0))
    falling = fit([(1, 1), (1, 2), (1, 3)], [3.0, 2.0, 1.0], [1, 1, 1])
    assert falling[1] == 0.0 and 1.0 <= falling[0] <= 3.0
    assert fit([(1, 1)], [0.0], [1]) == (0.0, 0.0)


def test_rounds_count_by_how_often_they_happened() -> None:
    constant, slope = fit([(1, 1), (1, 1)], [1.0, 2.0], [99, 1])
    assert constant + slope == pytest.approx(1.0, rel=0.02)


def test_predictions_of_measured_settings_meet_the_measurement(wide_evaluation: EvalResult) -> None:
    """The simulated machine's rounds cost what the model's form can say, within 5 % of noise."""
    (model,) = cost_models(wide_evaluation)
    measured = [p for p in model.predictions if p.measured is not None]
    assert len(measured) == 2 * (4 + 3)
    assert all(p.ratio == pytest.approx(1.0, abs=0.05) for p in measured)
    assert model.error < 0.03
    assert all(0 < p.host_share < 0.05 for p in measured)


def test_a_machine_that_slowed_down_is_told_from_a_batch_that_is_larger() -> None:
    """Rounds of 30 ms + 5 ms a row; batch 8, with the smaller rounds of its end, ran on a machine ten times slower."""

    def plain(rows: int, pace: float) -> RoundTime:
        return RoundTime(rows, 1, 0, 9, 0, 0.0, pace * (0.03 + 0.005 * rows), 0.0)

    one, eight = Setting(4, 0.0, 1), Setting(4, 0.0, 8)
    found = paces({one: [plain(1, 1.0)], eight: [plain(rows, 10.0) for rows in range(1, 9)]})
    assert found[eight] / found[one] == pytest.approx(10.0, rel=0.02)
    # Where each setting has one size, the larger batch is taken to be what is slow.
    found = paces({one: [plain(1, 1.0)], eight: [plain(8, 1.0)]})
    assert found[eight] / found[one] == pytest.approx(1.0, rel=0.05)


def test_a_result_without_drafts_or_rounds_has_no_model(evaluation: EvalResult) -> None:
    alone = replace(evaluation, drafts=[e for e in evaluation.drafts if e.draft == "none"])
    assert cost_models(alone) == []
    still = replace(evaluation, drafts=[replace(e, timings=[]) for e in evaluation.drafts])
    assert CostModel.fit(still, 0.0) is None
