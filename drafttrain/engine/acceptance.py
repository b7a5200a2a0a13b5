"""Counts of acceptance: pure functions of round records, for whoever measures a draft.

A round is *cut* when the output ends inside the accepted prefix (a stop token among the accepted drafts, or
the limit). Then the target never judged, for the caller's purpose, the depths behind the cut: they enter
neither numerator nor denominator of any rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul

from drafttrain.engine.records import RoundRecord


def is_cut(record: RoundRecord) -> bool:
    """Whether the output ended before the bonus token of this round."""
    return record.reason is not None and record.emitted <= record.accepted


def accepted_within(record: RoundRecord) -> int:
    """Accepted draft tokens that reached the caller."""
    return min(record.accepted, record.emitted)


def tau(records: Sequence[RoundRecord]) -> float | None:
    """Pooled emitted / rounds; None without rounds."""
    return sum(r.emitted for r in records) / len(records) if records else None


def acceptance_counts(records: Iterable[RoundRecord]) -> tuple[list[int], list[int], list[int]]:
    """Counts by depth, index 0 = depth 1.

    Returns:
        (accepted, reached, offered): rounds in which depth i was accepted; rounds in which depth i was
            judged because
            depth i-1 had been accepted; rounds that proposed depth i and were not cut before it.
    """
    accepted: list[int] = []
    reached: list[int] = []
    offered: list[int] = []
    for record in records:
        taken = accepted_within(record)
        limit = taken if is_cut(record) else record.levels
        while len(offered) < limit:
            accepted.append(0)
            reached.append(0)
            offered.append(0)
        for depth in range(limit):
            offered[depth] += 1
            reached[depth] += depth <= taken
            accepted[depth] += depth < taken
    return accepted, reached, offered


def chain_products(alpha: Iterable[float | None]) -> list[float]:
    """P(depth i accepted) over all rounds, from the conditional rates; a depth that was never reached counts 0."""
    return list(accumulate((a or 0.0 for a in alpha), mul))
