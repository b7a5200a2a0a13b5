from __future__ import annotations

from collections.abc import Callable

import pytest

from drafttrain.bench.speed import decode_tps, disturbed, impossible, speed, time_split
from drafttrain.engine.records import RoundRecord

Make = Callable[..., RoundRecord]


def plain(record: Make, request: str, count: int, seconds: float = 1.0) -> list[RoundRecord]:
    return [record(request, proposed=0, number=n, verify_s=seconds) for n in range(count)]


def test_speedup_is_the_ratio_of_pooled_decode_rates(record: Make) -> None:
    baseline = plain(record, "a", 10) + plain(record, "b", 20)
    drafted = [record("a", accepted=1, verify_s=1.0, draft_s=0.2, host_s=0.05)] * 5
    drafted += [record("b", accepted=1, verify_s=1.0, draft_s=0.2, host_s=0.05)] * 10
    result = speed(drafted, baseline, end_to_end_tps=1.5, baseline_end_to_end_tps=1.0)
    assert result is not None
    assert result.baseline_tps == pytest.approx(1.0)
    assert result.speedup == pytest.approx(30 / (15 * 1.25))
    assert result.speedup_ci == pytest.approx((1.6, 1.6))
    assert result.predicted == pytest.approx(2 * 1 / 1.25)
    assert result.ceiling == pytest.approx(2 * 1 / 1.2)
    assert result.of_ceiling == pytest.approx(1.6 / (2 / 1.2))
    assert result.end_to_end == 1.5
    assert result.flag is None


def test_a_speedup_above_tau_is_flagged_and_is_no_result(record: Make) -> None:
    result = speed(
        [record(accepted=1, verify_s=0.4)] * 5,
        plain(record, "a", 10),
        end_to_end_tps=9,
        baseline_end_to_end_tps=1,
    )
    assert result is not None
    assert result.flag is not None and "5.00x" in result.flag and "tau 2.00" in result.flag
    assert result.speedup is None and result.speedup_ci is None and result.end_to_end is None
    assert result.of_ceiling is None


def test_a_speedup_of_tau_is_possible() -> None:
    assert impossible(2.0, 2.0) is None
    assert impossible(2.001, 2.0) is not None


def test_a_baseline_that_was_disturbed_is_doubted(record: Make) -> None:
    """It is slower than it can be, so every draft beside it looks faster."""
    for slow, said in ((1, None), (4, "1.36 times")):
        rounds = plain(record, "a", 10 - slow) + plain(record, "b", slow, seconds=1.9)
        split = time_split(rounds)
        assert split is not None
        doubt = disturbed(split, len(rounds))
        assert doubt is None if said is None else doubt is not None and said in doubt


def test_rows_of_a_batch_share_their_round(record: Make) -> None:
    """Two rows in rounds of one second: two tokens a second, not one, and the seconds add up to the wall."""
    records = [record(name, proposed=0, batch=2, number=n) for n in range(5) for name in "ab"]
    assert decode_tps(records) == pytest.approx(2.0)
    split = time_split(records)
    assert split is not None
    assert split.total_s == pytest.approx(5.0)
    assert split.round_median_s == pytest.approx(1.0)


def test_nothing_measured_nothing_claimed(record: Make) -> None:
    assert speed([], plain(record, "a", 3)) is None
    assert speed(plain(record, "a", 3), []) is None
    assert time_split([]) is None and decode_tps([]) is None
