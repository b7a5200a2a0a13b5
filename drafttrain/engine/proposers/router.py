"""A lookup where it has found something, another draft elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.engine.proposers.base import Proposer, Reach, Row
from drafttrain.engine.proposers.lookup import Lookup, chains
from drafttrain.engine.verify import Part, Proposal
from drafttrain.engine.verify_batch import side_by_side
from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import Tap


class RouterProposer(Proposer):
    """Decides for each row and round: what a lookup found, if its match is long enough, else what the draft says.

    Answers that copy are copied for nothing, and long; the draft is not even run in a round in which every row was
    found. It learns of every round, its own or not, so its state is always the row's.

    Args:
        lookup: tried first.
        draft: for the other rows; chains or trees.
        min_match: fewest tokens that have to match.
        longest: most tokens of a lookup's chain.
        name: as reports show it.
    """

    def __init__(
        self,
        lookup: Lookup,
        draft: Proposer,
        min_match: int = 2,
        longest: int = 12,
        name: str | None = None,
    ) -> None:
        if min_match < 1 or longest < 1:
            raise EngineError(f"a router with min_match {min_match} and longest {longest}: both are at least 1")
        if isinstance(draft, RouterProposer | Lookup):
            raise EngineError(f"{draft.name} cannot be what {lookup.name} gives way to", remedy="give a neural draft")
        self.lookup, self.draft, self.min_match, self.longest = lookup, draft, min_match, longest
        self.name = name or f"{lookup.name} or {draft.name}"
        self.feature_spec, self.tree = draft.feature_spec, draft.tree
        draft.lazy = True
        self._depth = 0
        self._own: tuple[Tensor, Tensor] | None = None

    def reach(self, k: int) -> Reach:
        """The wider of both."""
        draft = self.draft.reach(k)
        self._depth = draft.depth
        return Reach(max(draft.depth, self.longest), max(draft.tokens, self.longest), draft.scratch)

    def attach(self, target: CausalLM, cache: StaticKVCache) -> None:
        """For the draft."""
        self.draft.attach(target, cache)

    def bytes_needed(self, rows: int, length: int) -> int:
        """Of both, in bytes."""
        return self.lookup.bytes_needed(rows, length) + self.draft.bytes_needed(rows, length)

    def reserve(self, rows: int, length: int) -> None:
        """Allocate for `rows` rows of up to `length` tokens."""
        self.draft.reserve(rows, length)

    def admit(self, first_row: int, rows: Sequence[Row], features: dict[Tap, Tensor]) -> None:
        """For the draft."""
        self.draft.admit(first_row, rows, features)

    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """What was found for some rows, beside the draft's proposal for the others."""
        found = self.lookup.look_up(rows, min(k, self.longest))
        taken = torch.tensor([len(f.tokens) > 0 and f.match >= self.min_match for f in found])
        self._own = (taken, ~taken)
        here, others = taken.nonzero()[:, 0], (~taken).nonzero()[:, 0]
        parts = []
        if len(others):
            drafted = self.draft.propose(rows, min(k, self._depth))
            if not len(here):
                return drafted
            parts.append(Part(others, drafted.of(others)))
        copied = [found[row].tokens for row in here.tolist()]
        part = chains(copied, max(map(len, copied)))
        if parts:
            part = part.to(parts[0].proposal.tokens.device)
        return side_by_side([*parts, Part(here, part)], len(rows))

    def observe(
        self,
        rows: Sequence[Row],
        features: dict[Tap, Tensor],
        accepted: Tensor,
        path: Tensor | None = None,
        own: Tensor | None = None,
    ) -> None:
        """Both learn what became of each row, and whether by their own tokens."""
        assert self._own is not None
        for proposer, mine in zip((self.lookup, self.draft), self._own, strict=True):
            proposer.observe(rows, features, accepted, path, mine if own is None else mine & own)

    def move_row(self, source: int, destination: int) -> None:
        """Row `source` takes the place of `destination`."""
        self.lookup.move_row(source, destination)
        self.draft.move_row(source, destination)

    def forget(self) -> None:
        """Drop what was learnt from past requests."""
        self.lookup.forget()
        self.draft.forget()

    def memory_bytes(self) -> int:
        """Of both, in bytes."""
        return self.lookup.memory_bytes() + self.draft.memory_bytes()
