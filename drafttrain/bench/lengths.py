"""Speed-up by the length of prompts and of outputs."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from drafttrain.bench.speed import Cell, speed
from drafttrain.engine.acceptance import tau
from drafttrain.engine.records import RoundRecord

AnswerKey = tuple[str, int, int]
"""(request, turn, repeat)."""
Answers = Mapping[AnswerKey, Sequence[RoundRecord]]
"""The rounds of each answer."""


@dataclass(frozen=True)
class LengthBucket(Cell):
    """Answers whose length is in a range.

    Attributes:
        low, high: tokens, from `low` to below `high`; None = no upper end.
    """

    low: int
    high: int | None

    def __str__(self) -> str:
        if self.high is None:
            return f"{self.low}+"
        return f"{self.low}–{self.high - 1}"


def by_length(
    answers: Answers,
    baseline: Answers,
    lengths: Mapping[AnswerKey, int],
    edges: Sequence[int],
    *,
    samples: int = 2000,
    seed: int = 0,
) -> list[LengthBucket]:
    """Compare a draft with the baseline on answers of each length.

    Args:
        answers, baseline: with and without drafting; those without a round may be left out.
        lengths: of each answer, in tokens. An answer is in the same bucket on both sides, however long the draft's
            sampled one came out.
        edges: ascending; buckets are [0, edges[0]), [edges[0], edges[1]), ..., [edges[-1], no end).
        samples, seed: of the bootstrap over requests.

    Returns:
        Buckets in which something was decoded on both sides.
    """
    members: dict[int, list[AnswerKey]] = {}
    for key in answers:
        if key in baseline:
            members.setdefault(bisect.bisect_right(edges, lengths[key]), []).append(key)
    ends = [0, *edges, None]
    found = []
    for index, keys in sorted(members.items()):
        rounds = [r for key in keys for r in answers[key]]
        measured = speed(rounds, [r for key in keys for r in baseline[key]], samples=samples, seed=seed)
        if measured is None:
            continue
        low = ends[index]
        assert low is not None
        found.append(
            LengthBucket(
                len(keys),
                tau(rounds),
                measured.speedup,
                measured.speedup_ci,
                measured.flag,
                low,
                ends[index + 1],
            )
        )
    return found
