from __future__ import annotations

import numpy as np
import pytest

from drafttrain.bench.bootstrap import paired_speedup_interval, ratio_interval


def test_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        rounds = rng.integers(20, 60, size=40).astype(float)
        emitted = rounds * rng.normal(2.0, 0.4, size=40)
        interval = ratio_interval(list(emitted), list(rounds), samples=400, seed=trial)
        assert interval is not None
        hits += interval[0] <= 2.0 <= interval[1]
    assert 178 <= hits <= 199


def test_interval_is_a_function_of_its_arguments() -> None:
    first = ratio_interval([3.0, 5.0, 4.0], [2.0, 2.0, 2.0], seed=3)
    assert first == ratio_interval([3.0, 5.0, 4.0], [2.0, 2.0, 2.0], seed=3)
    assert first is not None and 1.5 <= first[0] <= 2.0 <= first[1] <= 2.5


def test_pairing_cancels_what_both_sides_share() -> None:
    """Prompts of very different speed, each twice as fast with the draft: the interval has no width."""
    tokens = [100.0, 100.0, 100.0, 100.0]
    base_seconds = [1.0, 10.0, 3.0, 50.0]
    interval = paired_speedup_interval(tokens, [s / 2 for s in base_seconds], tokens, base_seconds)
    assert interval == pytest.approx((2.0, 2.0))


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_requests_have_no_interval(count: int) -> None:
    assert ratio_interval([1.0] * count, [1.0] * count) is None
    assert paired_speedup_interval([1.0] * count, [1.0] * count, [1.0] * count, [1.0] * count) is None


def test_different_requests_are_refused() -> None:
    with pytest.raises(ValueError, match="same requests"):
        paired_speedup_interval([1.0, 1.0], [1.0, 1.0], [1.0], [1.0])
    with pytest.raises(ValueError, match="differ in length"):
        ratio_interval([1.0], [1.0, 2.0])


def test_no_time_no_interval() -> None:
    assert ratio_interval([1.0, 1.0], [0.0, 0.0]) is None
