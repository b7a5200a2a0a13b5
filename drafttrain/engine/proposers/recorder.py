"""Proposes nothing, and keeps what the target computes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from drafttrain.engine.proposers.base import Proposer, Reach, Row
from drafttrain.engine.verify import Proposal
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import FeatureSpec, Tap


class StateRecorder(Proposer):
    """Has the states of each request that ended: of all its tokens but the last, which the target has not read.

    A request that its first token ends has none.

    Args:
        target: of the engine.
        taps: where.
    """

    sees_the_end = True

    def __init__(self, target: CausalLM, taps: Iterable[Tap]) -> None:
        self.name = "recorder"
        self.feature_spec = FeatureSpec(tuple(taps))
        self._target = target
        self._rows: dict[Tap, Tensor] = {}
        self._ended: dict[str, dict[Tap, Tensor]] = {}

    def take(self, request: str) -> dict[Tap, Tensor] | None:
        """tap -> [L, H] on the CPU, of a request that ended, once."""
        return self._ended.pop(request, None)

    def reach(self, k: int) -> Reach:
        """No tokens."""
        return Reach(0, 0)

    def bytes_needed(self, rows: int, length: int) -> int:
        """A row of states a token and tap."""
        size = self._target.hidden_size * self._target.dtype.itemsize
        return rows * length * len(self.feature_spec.taps) * size

    def reserve(self, rows: int, length: int) -> None:
        """Room for the states."""
        shape = (rows, length, self._target.hidden_size)
        self._rows = {
            tap: torch.zeros(shape, dtype=self._target.dtype, device=self._target.device)
            for tap in self.feature_spec.taps
        }

    def memory_bytes(self) -> int:
        """The room for states."""
        return sum(states.numel() * states.itemsize for states in self._rows.values())

    def admit(self, first_row: int, rows: Sequence[Row], features: dict[Tap, Tensor]) -> None:
        """Keep the prompts' states."""
        for tap, states in features.items():
            self._rows[tap][first_row : first_row + len(rows), : states.shape[1]] = states

    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """Nothing."""
        none = torch.zeros(len(rows), 0, dtype=torch.int64, device=self._target.device)
        return Proposal(none, torch.zeros(len(rows), dtype=torch.int64))

    def observe(
        self,
        rows: Sequence[Row],
        features: dict[Tap, Tensor],
        accepted: Tensor,
        path: Tensor | None = None,
        own: Tensor | None = None,
    ) -> None:
        """Keep the states at the roots that were read; let those of requests that ended be taken."""
        # Behind the root that was read stands the new one.
        places = torch.tensor([len(row.tokens) - 2 for row in rows], device=self._target.device)
        each = torch.arange(len(rows), device=self._target.device)
        for tap, states in features.items():
            self._rows[tap][each, places] = states[:, 0]
        for index, row in enumerate(rows):
            if row.reason is not None and row.error is None:
                read = len(row.tokens) - 1
                self._ended[row.request.id] = {
                    tap: kept[index, :read].to("cpu", copy=True) for tap, kept in self._rows.items()
                }

    def move_row(self, source: int, destination: int) -> None:
        """Bring the states along."""
        for states in self._rows.values():
            states[destination] = states[source]
