"""Drafts that look a continuation up instead of computing one."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from drafttrain.engine.proposers.base import Proposer, Row
from drafttrain.engine.verify import Proposal


class Found(NamedTuple):
    """What followed, and how many of the row's last tokens were found before it."""

    tokens: list[int]
    match: int


class Lookup(Proposer):
    """Proposes chains that followed the row's last tokens before; rows without a match propose nothing."""

    @abstractmethod
    def find(self, row: Row, k: int) -> Found:
        """At most k tokens; none where nothing matches."""

    def look_up(self, rows: Sequence[Row], k: int) -> list[Found]:
        """One for each row of the engine."""
        return [self.find(row, k) for row in rows]

    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """What was found, as chains."""
        return chains([found.tokens for found in self.look_up(rows, k)], k)


def chains(rows: Sequence[Sequence[int]], k: int) -> Proposal:
    """Chains of at most k tokens that were not sampled."""
    tokens = torch.zeros(len(rows), k, dtype=torch.int64)
    for index, follow in enumerate(rows):
        tokens[index, : len(follow)] = torch.tensor(follow, dtype=torch.int64)
    return Proposal(tokens, torch.tensor([len(follow) for follow in rows]))
