"""Round records put back together: what a round cost by its size."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from drafttrain.engine.records import RoundRecord


@dataclass(frozen=True)
class RoundTime:
    """Rounds of one size.

    Attributes:
        rows: requests that took part.
        width: tokens of a row in the target's forward, the root included.
        steps: depth of the deepest proposal.
        rounds: how many there were.
        proposed: draft tokens of all their rows.
        draft_s, verify_s, host_s: medians of a round, in seconds.
    """

    rows: int
    width: int
    steps: int
    rounds: int
    proposed: int
    draft_s: float
    verify_s: float
    host_s: float


def round_times(records: Sequence[RoundRecord]) -> list[RoundTime]:
    """What rounds of each size took.

    Args:
        records: as the engine wrote them: the rows of a round stand together.
    """
    alike: dict[tuple[int, int, int], list[list[RoundRecord]]] = defaultdict(list)
    for rows in whole_rounds(records):
        size = (len(rows), 1 + max(r.proposed for r in rows), max(r.levels for r in rows))
        alike[size].append(rows)
    return [
        RoundTime(
            *size,
            rounds=len(found),
            proposed=sum(r.proposed for rows in found for r in rows),
            draft_s=statistics.median(rows[0].draft_s for rows in found),
            verify_s=statistics.median(rows[0].verify_s for rows in found),
            host_s=statistics.median(rows[0].host_s for rows in found),
        )
        for size, found in sorted(alike.items())
    ]


def whole_rounds(records: Sequence[RoundRecord]) -> Iterator[list[RoundRecord]]:
    """The rows of each round, from records as the engine wrote them."""
    start = 0
    while start < len(records):
        end = start + records[start].batch
        yield list(records[start:end])
        start = end
