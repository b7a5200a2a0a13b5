"""Speed from round records: tokens per second, speed-up over the baseline, time split, predicted ceiling.

A round of a batch is shared: each of its rows has one record with the seconds of the whole round, and
1/batch of them is that row's share. Shares add up to the wall time of decoding.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from drafttrain.bench.bootstrap import Interval, paired_speedup_interval
from drafttrain.bench.metrics import by_request
from drafttrain.engine.acceptance import tau
from drafttrain.engine.records import RoundRecord

# Mean over median of plain rounds: 1.00 to 1.09 on a quiet machine, 1.5 with a neighbour.
_DISTURBED = 1.2


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of decoding by what they were spent on (row shares summed), and medians of one round."""

    draft_s: float
    verify_s: float
    host_s: float
    draft_median_s: float
    verify_median_s: float
    host_median_s: float

    @property
    def total_s(self) -> float:
        """Wall seconds of all rounds."""
        return self.draft_s + self.verify_s + self.host_s

    @property
    def round_median_s(self) -> float:
        """T_draft + T_verify + T_host."""
        return self.draft_median_s + self.verify_median_s + self.host_median_s


@dataclass(frozen=True)
class Speed:
    """A draft against the same engine without drafting.

    Attributes:
        decode_tps: emitted tokens a second of decoding, prefill outside both.
        baseline_tps: the same of the baseline.
        speedup: their ratio, or None when it is impossible (see `flag`).
        speedup_ci: paired 95 % bootstrap interval over requests; None with `flag`.
        end_to_end: ratio of tokens per second with the prefill and its token counted in; None when not
            measured.
        predicted: tau T_AR / (T_draft + T_verify + T_host) from the medians of this run.
        ceiling: the same without T_host: what an engine without any overhead would reach.
        flag: why the measured ratio is no result, or None.
    """

    decode_tps: float
    baseline_tps: float
    speedup: float | None
    speedup_ci: Interval | None
    end_to_end: float | None
    predicted: float | None
    ceiling: float | None
    flag: str | None

    @property
    def of_ceiling(self) -> float | None:
        """Measured speed-up as a share of the ceiling."""
        return self.speedup / self.ceiling if self.speedup is not None and self.ceiling else None


@dataclass(frozen=True)
class Cell:
    """One speed-up of a table.

    Attributes:
        answers: decoded with the draft and without.
        tau: tokens a round.
        speedup, speedup_ci: of decoding; None with `flag`.
        flag: why the measured ratio is no result, or None.
    """

    answers: int
    tau: float | None
    speedup: float | None
    speedup_ci: Interval | None
    flag: str | None


def share_s(record: RoundRecord) -> float:
    """The row's share of its round's wall seconds."""
    return (record.draft_s + record.verify_s + record.host_s) / record.batch


def decode_tps(records: Sequence[RoundRecord]) -> float | None:
    """Emitted tokens per second of decoding; None without rounds or time."""
    seconds = sum(share_s(r) for r in records)
    return sum(r.emitted for r in records) / seconds if seconds > 0 else None


def time_split(records: Sequence[RoundRecord]) -> TimeSplit | None:
    """Where the time of decoding went; None without rounds."""
    if not records:
        return None
    return TimeSplit(
        draft_s=sum(r.draft_s / r.batch for r in records),
        verify_s=sum(r.verify_s / r.batch for r in records),
        host_s=sum(r.host_s / r.batch for r in records),
        draft_median_s=statistics.median(r.draft_s for r in records),
        verify_median_s=statistics.median(r.verify_s for r in records),
        host_median_s=statistics.median(r.host_s for r in records),
    )


def speed(
    records: Sequence[RoundRecord],
    baseline: Sequence[RoundRecord],
    *,
    end_to_end_tps: float | None = None,
    baseline_end_to_end_tps: float | None = None,
    samples: int = 2000,
    seed: int = 0,
) -> Speed | None:
    """Compare decoding with a draft to the baseline at the same batch, temperature and prompts.

    Args:
        records, baseline: rounds of the same requests with and without drafting.
        end_to_end_tps, baseline_end_to_end_tps: tokens per second with everything counted.

    Returns:
        None when either side has no rounds, for then nothing was measured.
    """
    fast, plain = decode_tps(records), decode_tps(baseline)
    split, base_split, length = time_split(records), time_split(baseline), tau(records)
    if fast is None or plain is None or split is None or base_split is None or length is None:
        return None
    ratio = fast / plain
    flag = impossible(ratio, length)
    whole = end_to_end_tps / baseline_end_to_end_tps if end_to_end_tps and baseline_end_to_end_tps else None
    target_median = base_split.round_median_s
    work = split.draft_median_s + split.verify_median_s
    return Speed(
        decode_tps=fast,
        baseline_tps=plain,
        speedup=None if flag else ratio,
        speedup_ci=None if flag else _paired(records, baseline, samples, seed),
        end_to_end=None if flag else whole,
        predicted=length * target_median / split.round_median_s if split.round_median_s > 0 else None,
        ceiling=length * target_median / work if work > 0 else None,
        flag=flag,
    )


def impossible(ratio: float, length: float) -> str | None:
    """A round costs a forward of the target or more and gives tau tokens: no speed-up above tau is real."""
    if ratio <= length:
        return None
    return (
        f"measured {ratio:.2f}x is above tau {length:.2f}, which is impossible: "
        "the timing is disturbed (a busy machine, or too few prompts); measure again"
    )


def disturbed(plain: TimeSplit, rounds: int) -> str | None:
    """Rounds of plain decoding at batch 1 are alike; where they are not, something else ran meanwhile.

    Args:
        plain: the baseline's time at batch 1, over `rounds`.
    """
    usual = rounds * plain.round_median_s
    if not usual or plain.total_s / usual < _DISTURBED:
        return None
    return (
        f"its rounds took {plain.total_s / usual:.2f} times as long in the mean as in the median: the machine was busy "
        "with something else, and speed-ups over it may be too high; measure again"
    )


def _paired(
    records: Iterable[RoundRecord], baseline: Iterable[RoundRecord], samples: int, seed: int
) -> Interval | None:
    mine, theirs = by_request(records), by_request(baseline)
    both = [request for request in mine if request in theirs]
    return paired_speedup_interval(
        [sum(r.emitted for r in mine[q]) for q in both],
        [sum(share_s(r) for r in mine[q]) for q in both],
        [sum(r.emitted for r in theirs[q]) for q in both],
        [sum(share_s(r) for r in theirs[q]) for q in both],
        samples=samples,
        seed=seed,
    )
