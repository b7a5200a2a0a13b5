"""Chains and static trees of the heads' tokens (Medusa, arXiv 2401.10774)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.drafters.medusa.model import MedusaDrafter
from drafttrain.engine.proposers.base import Proposer, Row
from drafttrain.engine.proposers.choose import Chooser
from drafttrain.engine.proposers.grow import grow_static
from drafttrain.engine.tree import TreeShape
from drafttrain.engine.verify import Proposal
from drafttrain.errors import EngineError
from drafttrain.modeling.head import Head
from drafttrain.modeling.taps import Tap


class MedusaProposer(Proposer):
    """Keeps, a row, the target's final state at the token before the root; head i reads it for the i-th draft.

    Args:
        drafter: the heads.
        name: as reports show it.
        tree: what to propose; None = chains. `calibrate.head_accuracies` and `TreeShape.from_accuracies` find one.
        sampled: in sampled rows, draw a tree's children without replacement instead of taking the best tokens.

    Raises:
        EngineError: the tree is deeper than there are heads.
    """

    def __init__(
        self, drafter: MedusaDrafter, name: str | None = None, tree: TreeShape | None = None, sampled: bool = False
    ) -> None:
        if tree is not None and tree.depth > drafter.max_depth:
            raise EngineError(
                f"a tree of depth {tree.depth} was asked of {drafter.max_depth} Medusa heads",
                remedy=f"give a tree of depth {drafter.max_depth} or less",
            )
        drafter.prepare_for_inference()
        self.tree, self.sampled = tree, sampled
        self.drafter = drafter
        self._heads = _prepared(drafter)
        self.name = name or drafter.family
        self.feature_spec = drafter.feature_spec

    def bytes_needed(self, rows: int, length: int) -> int:
        """Of the state, in bytes."""
        return rows * self.drafter.arch.target_hidden_size * next(self.drafter.parameters()).element_size()

    def reserve(self, rows: int, length: int) -> None:
        """Allocate for `rows` rows."""
        weight = next(self.drafter.parameters())
        size = self.drafter.arch.target_hidden_size
        self._state = torch.zeros(rows, size, dtype=weight.dtype, device=weight.device)

    def admit(self, first_row: int, rows: Sequence[Row], features: dict[Tap, Tensor]) -> None:
        """Keep the state at the end of each prompt."""
        self._keep(first_row, features, torch.tensor([len(row.request.prompt_ids) - 1 for row in rows]))

    def observe(
        self,
        rows: Sequence[Row],
        features: dict[Tap, Tensor],
        accepted: Tensor,
        path: Tensor | None = None,
        own: Tensor | None = None,
    ) -> None:
        """Keep the state at the last accepted token."""
        self._keep(0, features, accepted)

    def _keep(self, first: int, features: dict[Tap, Tensor], last: Tensor) -> None:
        final = features[Tap.final]
        rows = torch.arange(len(last), device=final.device)
        self._state[first : first + len(last)] = final[rows, last.to(final.device)]

    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """One token a head, or the tree."""
        if isinstance(self.tree, TreeShape):
            shape = self.tree.cut(k)
            logits = self._logits(0, len(rows))

            def step(tokens: Tensor, parents: Tensor, sees: Tensor, offset: int, depth: int) -> Tensor:
                return self._logits(depth, len(rows))[:, None]

            return grow_static(shape, rows, logits, step, self.drafter.vocab_map, self.sampled).proposal
        if k > self.drafter.max_depth:
            raise EngineError(
                f"{k} draft tokens were asked of {self.drafter.max_depth} Medusa heads",
                remedy=f"set k to {self.drafter.max_depth} or less",
            )
        chooser = Chooser(rows, self.drafter.vocab_map)
        for depth in range(k):
            chooser.pick(self._logits(depth, len(rows)))
        return chooser.proposal()

    def _logits(self, head: int, count: int) -> Tensor:
        return self._heads[head](self.drafter.read(self._state[:count], head))

    def move_row(self, source: int, destination: int) -> None:
        """Row `source` takes the place of `destination`."""
        self._state[destination] = self._state[source]

    def memory_bytes(self) -> int:
        """Weights, in bytes."""
        return sum(p.numel() * p.element_size() for p in self.drafter.parameters())


def _prepared(drafter: MedusaDrafter) -> list[Head]:
    """The head of each depth; depths that share the target's share one packed copy of it."""
    prepared: dict[int, Head] = {}
    heads = [drafter.head(depth) for depth in range(drafter.max_depth)]
    for head in heads:
        place = head.weight.data_ptr()
        if place not in prepared:
            prepared[place] = head.prepared()
    return [prepared[head.weight.data_ptr()] for head in heads]
