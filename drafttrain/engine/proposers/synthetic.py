"""A draft of a given quality, to measure the engine alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from drafttrain.engine.proposers.base import Row
from drafttrain.engine.proposers.oracle import OracleProposer
from drafttrain.engine.sampling import RowStreams, uniforms
from drafttrain.engine.verify import Proposal
from drafttrain.errors import EngineError


class SyntheticProposer(OracleProposer):
    """Replays recorded outputs, each token right with probability `rate` independently of the others.

    Rounds of greedy requests then accept as a draft with a constant conditional acceptance does: 1 + rate + ... +
    rate^k tokens are emitted in the mean.

    Args:
        outputs: request id -> the tokens the target emitted for it.
        vocab_size: of the target.
        rate: in [0, 1].
        seed: a request's errors depend on it, the request and the place alone.
    """

    def __init__(
        self,
        outputs: Mapping[str, Sequence[int]],
        vocab_size: int,
        rate: float,
        seed: int = 0,
        name: str = "synthetic",
    ) -> None:
        if not 0 <= rate <= 1:
            raise EngineError(f"the synthetic draft's rate is {rate}", remedy="it lies in [0, 1]")
        super().__init__(outputs, name)
        self.vocab_size, self.rate, self.seed = vocab_size, rate, seed

    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """The next k recorded tokens of each row, some of them replaced by their neighbour in the vocabulary."""
        proposal = super().propose(rows, k)
        for index, row in enumerate(rows):
            stream = RowStreams(self.seed, row.request.id).proposal(len(row.tokens))
            wrong = uniforms([stream], k)[0] >= self.rate
            proposal.tokens[index] = torch.where(
                wrong, (proposal.tokens[index] + 1) % self.vocab_size, proposal.tokens[index]
            )
        return proposal
