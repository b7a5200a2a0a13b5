"""Prompt lookup: repeat what followed the last n-gram before. Needs no model."""

from __future__ import annotations

from drafttrain.engine.proposers.base import Row
from drafttrain.engine.proposers.lookup import Found, Lookup


class NGramProposer(Lookup):
    """Looks for the latest earlier occurrence of the last `longest` .. `shortest` tokens and proposes what followed.

    Args:
        longest, shortest: sizes of the n-grams tried, longest first.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, name: str = "ngram") -> None:
        self.longest, self.shortest, self.name = longest, shortest, name

    def find(self, row: Row, k: int) -> Found:
        """What followed the longest n-gram that occurred before."""
        tokens = row.tokens
        end = len(tokens)
        for size in range(min(self.longest, end - 1), self.shortest - 1, -1):
            tail = tokens[end - size :]
            for start in range(end - size - 1, -1, -1):
                if tokens[start] == tail[0] and tokens[start : start + size] == tail:
                    return Found(tokens[start + size : start + size + k], size)
        return Found([], 0)
