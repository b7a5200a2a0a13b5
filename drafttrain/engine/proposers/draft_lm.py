"""Chains and trees from a separate small LM (arXiv 2211.17192)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.drafters.base import DraftInputs
from drafttrain.drafters.lm.model import DraftLM
from drafttrain.engine.proposers.base import Proposer, Row
from drafttrain.engine.proposers.choose import Chooser
from drafttrain.engine.proposers.grow import grow_dynamic, grow_static
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.engine.verify import Proposal
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import Tap


class DraftLMProposer(Proposer):
    """Keeps, a row, the draft's cache of the tokens it has read. After a fully accepted round it lacks the last one.

    Args:
        drafter: the draft.
        name: as reports show it.
        tree: what to propose; None = chains.
        sampled: in sampled rows, draw a static tree's children without replacement instead of taking the best tokens.
    """

    def __init__(
        self,
        drafter: DraftLM,
        name: str | None = None,
        tree: TreeShape | DynamicTree | None = None,
        sampled: bool = False,
    ) -> None:
        drafter.prepare_for_inference()
        self.tree, self.sampled = tree, sampled
        self._slots: Tensor | None = None
        self.drafter = drafter
        self.name = name or drafter.family
        self._head = drafter.head(0).prepared()

    def reserve(self, rows: int, length: int) -> None:
        """Allocate for `rows` rows of up to `length` tokens."""
        ahead = 0 if self.tree is None else self.tree.read_ahead
        self._cache: StaticKVCache = self.drafter.new_cache(rows, length + ahead)

    def admit(self, first_row: int, rows: Sequence[Row], features: dict[Tap, Tensor]) -> None:
        """Read the prompts but for their last token, which the first round's step reads."""
        lengths = torch.tensor([len(row.request.prompt_ids) - 1 for row in rows])
        self._cache.set_lengths(torch.zeros_like(lengths), first_row)
        if int(lengths.max()) > 0:
            self._read(rows, lengths, first_row)
            self._cache.commit(lengths)

    def _read(self, rows: Sequence[Row], counts: Tensor, first: int = 0) -> Tensor:
        """Run the next counts[b] tokens of each row, right-padded; the readouts [n, T, H]."""
        longest = int(counts.max())
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        for index, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            start = int(self._cache.lengths[first + index])
            tokens[index, :count] = torch.tensor(row.tokens[start : start + count], dtype=torch.int64)
        self._cache.begin(len(rows), longest, first_row=first)
        inputs = DraftInputs(tokens.to(self._cache.device), self._cache.positions())
        return self.drafter.step(inputs, self._cache).readout

    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """Catch up with the accepted tokens and the root, then k - 1 single steps."""
        count = len(rows)
        missing = torch.tensor([len(row.tokens) for row in rows]) - self._cache.lengths[:count]
        readout = self._read(rows, missing)
        self._cache.commit(missing)
        device = self._cache.device
        last = readout[torch.arange(count, device=device), (missing - 1).to(device)]
        if self.tree is not None:
            return self._propose_tree(rows, k, self.tree, self._head(last))
        chooser = Chooser(rows, self.drafter.vocab_map)
        token = chooser.pick(self._head(last))
        for depth in range(1, k):
            self._cache.begin(count, 1, offset=depth - 1)
            out = self.drafter.step(DraftInputs(token[:, None], self._cache.positions()), self._cache)
            token = chooser.pick(self._head(out.readout[:, 0]))
        self._read_ahead = k - 1
        return chooser.proposal()

    def _propose_tree(self, rows: Sequence[Row], k: int, tree: TreeShape | DynamicTree, logits: Tensor) -> Proposal:
        def step(tokens: Tensor, parents: Tensor, sees: Tensor, offset: int, depth: int) -> Tensor:
            self._cache.begin(len(rows), tokens.shape[1], tail_mask=sees, offset=offset)
            out = self.drafter.step(DraftInputs(tokens, self._cache.positions()), self._cache)
            return self._head(out.readout)

        if isinstance(tree, DynamicTree):
            grown = grow_dynamic(tree, min(k, tree.depth), rows, logits, step, self.drafter.vocab_map)
        else:
            grown = grow_static(tree.cut(k), rows, logits, step, self.drafter.vocab_map, self.sampled)
        self._slots = grown.slots
        return grown.proposal

    def observe(
        self, rows: Sequence[Row], features: dict[Tap, Tensor], accepted: Tensor, path: Tensor | None = None
    ) -> None:
        """What was read ahead and accepted stays in the cache."""
        if path is None:
            self._cache.lengths[: len(rows)] += accepted.clamp(max=self._read_ahead)
            return
        assert self._slots is not None
        slots = self._slots.cpu().expand(len(rows), -1).gather(1, path[:, 1:] - 1)
        # A node is read before its children, so the unread ones are the last of a path.
        order = torch.arange(slots.shape[1])
        kept = (order < accepted[:, None]) & (slots >= 0)
        self._cache.compact(torch.where(kept, slots, order))
        self._cache.lengths[: len(rows)] += kept.sum(1)

    def move_row(self, source: int, destination: int) -> None:
        """Row `source` takes the place of `destination`."""
        self._cache.move_row(source, destination)

    def memory_bytes(self) -> int:
        """Weights and cache, in bytes."""
        weights = sum(p.numel() * p.element_size() for p in self.drafter.parameters())
        return weights + (self._cache.bytes() if hasattr(self, "_cache") else 0)
