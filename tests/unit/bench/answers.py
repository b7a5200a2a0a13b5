"""Rounds by answer, as a runner keeps them."""

from __future__ import annotations

from collections.abc import Sequence

from drafttrain.bench.lengths import AnswerKey
from drafttrain.engine.records import RoundRecord


def once(records: Sequence[RoundRecord]) -> dict[AnswerKey, list[RoundRecord]]:
    """The rounds of each answer, of requests that were run once."""
    answers: dict[AnswerKey, list[RoundRecord]] = {}
    for record in records:
        answers.setdefault((record.request, record.turn, 0), []).append(record)
    return answers
