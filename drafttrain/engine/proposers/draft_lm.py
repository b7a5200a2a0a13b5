"""Chains and trees from a draft that reads tokens: a separate small LM (arXiv 2211.17192) or a part of the target."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.drafters.lm.model import DraftLM
from drafttrain.engine.proposers.base import Proposer, Reach, Row
from drafttrain.engine.proposers.choose import Chooser
from drafttrain.engine.proposers.grow import grow_dynamic, grow_static
from drafttrain.engine.proposers.readers import ModelReader, Reader
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.engine.verify import Proposal, Resume
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import Tap


class ReaderProposer(Proposer):
    """Drafts token by token, or level by level.

    Args:
        reader: the draft.
        name: as reports show it.
        tree: what to propose; None = chains.
        sampled: in sampled rows, draw a static tree's children without replacement instead of taking the best tokens.
    """

    def __init__(
        self,
        reader: Reader,
        name: str | None = None,
        tree: TreeShape | DynamicTree | None = None,
        sampled: bool = False,
    ) -> None:
        self.reader, self.tree, self.sampled = reader, tree, sampled
        self.name = name or reader.name
        self.resumes = True
        """Whether a part of the target hands over what it has computed; only what the target itself checks goes on."""
        self._slots: Tensor | None = None

    def reach(self, k: int) -> Reach:
        """As the tree's; a part of the target reads its nodes in the target's cache."""
        reach = super().reach(k)
        if isinstance(self.reader, ModelReader):
            return reach
        return reach._replace(scratch=1 + (k if self.tree is None else self.tree.read_ahead))

    def attach(self, target: CausalLM, cache: StaticKVCache) -> None:
        """For drafts that are a part of the target."""
        self.reader.attach(target, cache)

    def _length(self, length: int) -> int:
        return length + (0 if self.tree is None else self.tree.read_ahead)

    def bytes_needed(self, rows: int, length: int) -> int:
        """Of the draft's cache, in bytes."""
        return self.reader.bytes_needed(rows, self._length(length))

    def reserve(self, rows: int, length: int) -> None:
        """Allocate for `rows` rows of up to `length` tokens."""
        self.reader.reserve(rows, self._length(length))

    def admit(self, first_row: int, rows: Sequence[Row], features: dict[Tap, Tensor]) -> None:
        """Read the prompts."""
        self.reader.admit(first_row, rows)

    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """Catch up with the accepted tokens and the root, then k - 1 single steps."""
        self.reader.start(rows)
        logits = self.reader.extend(rows)[:, 0]
        self.reader.keep(torch.zeros(len(rows), dtype=torch.int64))
        proposal = self._chain(rows, k, logits) if self.tree is None else self._grow(rows, k, self.tree, logits)
        self.reader.finish()
        return proposal

    def _chain(self, rows: Sequence[Row], k: int, logits: Tensor) -> Proposal:
        chooser = Chooser(rows, self.reader.vocab_map)
        states = [self.reader.states]
        token = chooser.pick(logits)
        for depth in range(1, k):
            token = chooser.pick(self.reader.read(token[:, None], depth - 1)[:, 0])
            states.append(self.reader.states)
        proposal = chooser.proposal()
        if self.reader.course is not None and self.resumes:
            self.reader.pass_through(token[:, None], k - 1)
            states.append(self.reader.states)
            proposal.resume = Resume(self.reader.course, torch.cat([s for s in states if s is not None], 1))
        if k > 1:
            self.reader.advance(proposal.tokens[:, : k - 1])
        return proposal

    def _grow(self, rows: Sequence[Row], k: int, tree: TreeShape | DynamicTree, logits: Tensor) -> Proposal:
        def step(tokens: Tensor, parents: Tensor, sees: Tensor, offset: int, depth: int) -> Tensor:
            return self.reader.read(tokens, offset, sees)

        if isinstance(tree, DynamicTree):
            grown = grow_dynamic(tree, min(k, tree.depth), rows, logits, step, self.reader.vocab_map)
        else:
            grown = grow_static(tree.cut(k), rows, logits, step, self.reader.vocab_map, self.sampled)
        self._slots = grown.slots
        return grown.proposal

    def observe(
        self,
        rows: Sequence[Row],
        features: dict[Tap, Tensor],
        accepted: Tensor,
        path: Tensor | None = None,
        own: Tensor | None = None,
    ) -> None:
        """What was read ahead on the path that was kept stays in the draft's cache."""
        if path is None or self._slots is None or not isinstance(self.reader, ModelReader):
            return
        slots, self._slots = self._slots.cpu().expand(len(rows), -1), None
        # A path of another draft's tokens may be longer than any of this one's.
        path = path[:, : slots.shape[1] + 1]
        slots = slots.gather(1, (path[:, 1:] - 1).clamp(max=slots.shape[1] - 1))
        # A node is read before its children, so the unread ones are the last of a path.
        order = torch.arange(slots.shape[1])
        kept = (order < accepted[:, None]) & (slots >= 0)
        if own is not None:
            kept &= own[:, None]
        self.reader.compact(rows, torch.where(kept, slots, order), kept.sum(1))

    def move_row(self, source: int, destination: int) -> None:
        """Row `source` takes the place of `destination`."""
        self.reader.move_row(source, destination)

    def memory_bytes(self) -> int:
        """What the draft adds, in bytes."""
        return self.reader.memory_bytes()


class DraftLMProposer(ReaderProposer):
    """A trained draft LM.

    Args:
        drafter: the draft.
        name, tree, sampled: as of `ReaderProposer`.
    """

    def __init__(
        self,
        drafter: DraftLM,
        name: str | None = None,
        tree: TreeShape | DynamicTree | None = None,
        sampled: bool = False,
    ) -> None:
        drafter.prepare_for_inference()
        super().__init__(ModelReader(drafter.lm, name or drafter.family), name, tree, sampled)
        self.device = drafter.lm.device
