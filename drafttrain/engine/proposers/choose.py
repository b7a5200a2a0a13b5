"""How a neural draft picks its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.engine.penalty import DraftPenalty
from drafttrain.engine.proposers.base import Row
from drafttrain.engine.sampling import draw, probabilities, uniforms
from drafttrain.engine.verify import Proposal
from drafttrain.modeling.vocab_map import VocabMap


class Chooser:
    """Picks a token a row and step: the argmax for greedy rows, a sample from the draft's own distribution,
    processed as the target's is, for the others. Remembers what the verifier has to know.

    Args:
        rows: rows of this round.
        vocab_map: the draft's vocabulary.
    """

    def __init__(self, rows: Sequence[Row], vocab_map: VocabMap) -> None:
        self.params = [row.request.sampling for row in rows]
        self.sampled = not all(p.greedy for p in self.params)
        self.streams = [None if row.streams is None else row.streams.proposal(len(row.tokens)) for row in rows]
        self.vocab_map = vocab_map
        self._penalty = DraftPenalty(rows, vocab_map)
        self.tokens: list[Tensor] = []
        self.q: list[Tensor] = []

    def pick(self, logits: Tensor) -> Tensor:
        """logits [n, Vd] -> target ids int64 [n]."""
        logits = self._penalty.apply(logits)
        if self.sampled:
            q = probabilities(logits, self.params)
            chosen = draw(q, uniforms(self.streams, 1, first=len(self.q))[:, 0])
            self.q.append(q)
        else:
            chosen = logits.argmax(-1)
        self._penalty.add(chosen)
        token = chosen if self.vocab_map.is_full else self.vocab_map.to_target(chosen)
        self.tokens.append(token)
        return token

    def proposal(self) -> Proposal:
        """All picked so far as chains."""
        tokens = torch.stack(self.tokens, 1)
        counts = torch.full((tokens.shape[0],), tokens.shape[1])
        return Proposal(tokens, counts, torch.stack(self.q, 1) if self.sampled else None, self.vocab_map)
