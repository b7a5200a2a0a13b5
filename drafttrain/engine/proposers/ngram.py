"""Prompt lookup: repeat what followed the last n-gram before. Needs no model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafttrain.engine.proposers.base import Proposer, Row
from drafttrain.engine.verify import Proposal


class NGramProposer(Proposer):
    """Looks for the latest earlier occurrence of the last `longest` .. `shortest` tokens and proposes what followed.

    Args:
        longest, shortest: sizes of the n-grams tried, longest first.
    """

    def __init__(self, longest: int = 4, shortest: int = 2, name: str = "ngram") -> None:
        self.longest, self.shortest, self.name = longest, shortest, name

    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """Rows without a match propose nothing."""
        found = [self._lookup(row.tokens, k) for row in rows]
        tokens = torch.zeros(len(rows), k, dtype=torch.int64)
        for index, follow in enumerate(found):
            tokens[index, : len(follow)] = torch.tensor(follow, dtype=torch.int64)
        return Proposal(tokens, torch.tensor([len(follow) for follow in found]))

    def _lookup(self, tokens: list[int], k: int) -> list[int]:
        end = len(tokens)
        for size in range(min(self.longest, end - 1), self.shortest - 1, -1):
            tail = tokens[end - size :]
            for start in range(end - size - 1, -1, -1):
                if tokens[start] == tail[0] and tokens[start : start + size] == tail:
                    return tokens[start + size : start + size + k]
        return []
