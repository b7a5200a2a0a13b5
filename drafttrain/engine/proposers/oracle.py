"""The ceiling: a draft that knows the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from drafttrain.engine.proposers.base import Proposer, Row
from drafttrain.engine.verify import Proposal
from drafttrain.errors import RequestError


class OracleProposer(Proposer):
    """Replays recorded outputs.

    Args:
        outputs: request id -> the tokens the target emitted for it.
    """

    def __init__(self, outputs: Mapping[str, Sequence[int]], name: str = "oracle") -> None:
        self.outputs, self.name = outputs, name

    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """The next k recorded tokens of each row; fewer near the end."""
        tokens = torch.zeros(len(rows), k, dtype=torch.int64)
        counts = torch.zeros(len(rows), dtype=torch.int64)
        for index, row in enumerate(rows):
            recorded = self.outputs.get(row.request.id)
            if recorded is None:
                raise RequestError(
                    row.request.id,
                    f"the oracle has no recorded output for request {row.request.id}",
                    remedy="run the same requests without a draft first",
                )
            follow = list(recorded[row.emitted : row.emitted + k])
            tokens[index, : len(follow)] = torch.tensor(follow, dtype=torch.int64)
            counts[index] = len(follow)
        return Proposal(tokens, counts)
