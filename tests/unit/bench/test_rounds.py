from __future__ import annotations

from collections.abc import Callable

from drafttrain.bench.lengths import by_length
from drafttrain.bench.rounds import round_times
from drafttrain.engine.records import RoundRecord
from tests.unit.bench.answers import once

Make = Callable[..., RoundRecord]


def test_rows_of_a_round_are_counted_once_and_sizes_kept_apart(record: Make) -> None:
    two = [record(q, proposed=p, batch=2, draft_s=0.1, verify_s=1.0) for p in (3, 4) for q in "ab"]
    ragged = [record("a", proposed=1, batch=2, verify_s=3.0), record("b", proposed=4, batch=2, verify_s=3.0)]
    alone = [record("a", proposed=4, verify_s=0.5)]
    times = round_times([*two, *ragged, *alone])
    assert [(t.rows, t.width, t.steps, t.rounds, t.proposed) for t in times] == [
        (1, 5, 4, 1, 4),
        (2, 4, 3, 1, 6),
        (2, 5, 4, 2, 13),
    ]
    assert [t.verify_s for t in times] == [0.5, 1.0, 2.0]
    assert round_times([]) == []


def test_buckets_pair_the_same_answers_on_both_sides(record: Make) -> None:
    """Long answers gain 1.5x, short ones nothing; an answer that one side lacks is in no bucket."""
    baseline = [record(q, proposed=0, number=n) for q in ("s", "l", "m", "x") for n in range(6)]
    drafted = [record("s", accepted=1, number=n, verify_s=2.0) for n in range(3)]
    drafted += [record(q, accepted=2, number=n, verify_s=2.0) for q in ("l", "m") for n in range(2)]
    lengths = {("s", 0, 0): 9, ("l", 0, 0): 10, ("m", 0, 0): 99, ("x", 0, 0): 5}
    answers, plain = once(drafted), once(baseline)
    buckets = by_length(answers, plain, lengths, [10, 100], samples=100)
    assert [(str(b), b.answers, b.tau, b.speedup) for b in buckets] == [("0–9", 1, 2.0, 1.0), ("10–99", 2, 3.0, 1.5)]
    assert buckets[0].speedup_ci is None and buckets[1].speedup_ci == (1.5, 1.5)
    assert [str(b) for b in by_length(answers, plain, lengths, [9], samples=100)] == ["9+"]


def test_an_impossible_bucket_is_no_result(record: Make) -> None:
    baseline = [record("a", proposed=0, number=n) for n in range(6)]
    drafted = [record("a", accepted=1, number=n, verify_s=0.5) for n in range(3)]
    (bucket,) = by_length(once(drafted), once(baseline), {("a", 0, 0): 7}, [10])
    assert bucket.speedup is None and bucket.flag is not None and "impossible" in bucket.flag
