"""Chains and trees from a draft that predicts features (EAGLE-1, EAGLE-3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.drafters.base import DraftInputs
from drafttrain.drafters.eagle.base import EagleDrafter
from drafttrain.engine.proposers.base import Proposer, Row
from drafttrain.engine.proposers.choose import Chooser
from drafttrain.engine.proposers.grow import grow_dynamic, grow_static
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.engine.verify import Proposal
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import Tap


class EagleProposer(Proposer):
    """Keeps, a row: the draft's cache of slots made from the target's features, and the state after the last slot.

    A row whose cached tokens are x_0 .. x_{L-1} and whose root is x_L has slots 0 .. L-1, slot t = (f_t, x_{t+1}).
    The first draft token is read from slot L-1; the next ones from steps on the draft's own state, which are written
    behind the slots and forgotten after the round.

    Args:
        drafter: the draft.
        name: as reports show it.
        tree: what to propose; None = chains.
        sampled: in sampled rows, draw a static tree's children without replacement instead of taking the best tokens.
    """

    def __init__(
        self,
        drafter: EagleDrafter[object],
        name: str | None = None,
        tree: TreeShape | DynamicTree | None = None,
        sampled: bool = False,
    ) -> None:
        drafter.prepare_for_inference()
        self.tree, self.sampled = tree, sampled
        self.drafter = drafter
        self.name = name or drafter.family
        self.feature_spec = drafter.feature_spec
        self._head = drafter.head(0).prepared()

    def reserve(self, rows: int, length: int) -> None:
        """Allocate for `rows` rows of up to `length` tokens."""
        ahead = 0 if self.tree is None else self.tree.read_ahead
        self._cache: StaticKVCache = self.drafter.new_cache(rows, length + ahead)
        size = self.drafter.arch.hidden_size
        self._hidden = torch.zeros(rows, size, dtype=self.drafter.dtype(), device=self._cache.device)
        self._readout = torch.zeros_like(self._hidden)

    def admit(self, first_row: int, rows: Sequence[Row], features: dict[Tap, Tensor]) -> None:
        """Make the slots of the prompts."""
        lengths = torch.tensor([len(row.tokens) - 1 for row in rows])
        self._cache.set_lengths(torch.zeros_like(lengths), first_row)
        self._extend(first_row, rows, features, lengths)

    def observe(
        self, rows: Sequence[Row], features: dict[Tap, Tensor], accepted: Tensor, path: Tensor | None = None
    ) -> None:
        """Make the slots of the root and the accepted tokens, this time from the target's features."""
        self._extend(0, rows, features, accepted + 1)

    def _extend(self, first: int, rows: Sequence[Row], features: dict[Tap, Tensor], counts: Tensor) -> None:
        longest = int(counts.max())
        device = self._cache.device
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        for index, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            # The tokens one behind each feature, up to the new root. A row that stopped early holds fewer.
            start = int(self._cache.lengths[first + index]) + 1
            following = row.tokens[start : start + count]
            tokens[index, : len(following)] = torch.tensor(following, dtype=torch.int64)
        self._cache.begin(len(rows), longest, first_row=first)
        taps = [features[tap][:, :longest] for tap in self.feature_spec.taps]
        joined = taps[0] if len(taps) == 1 else torch.cat(taps, -1)
        out = self.drafter.step(DraftInputs(tokens.to(device), self._cache.positions(), joined), self._cache)
        self._cache.commit(counts)
        assert out.hidden is not None
        each, last = torch.arange(len(rows), device=device), (counts - 1).to(device)
        self._hidden[first : first + len(rows)] = out.hidden[each, last]
        self._readout[first : first + len(rows)] = out.readout[each, last]

    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """k recurrent steps."""
        if self.tree is not None:
            return self._propose_tree(rows, k, self.tree)
        count = len(rows)
        chooser = Chooser(rows, self.drafter.vocab_map)
        token = chooser.pick(self._head(self._readout[:count]))
        state = self._hidden[:count, None]
        for depth in range(1, k):
            self._cache.begin(count, 1, offset=depth - 1)
            inputs = DraftInputs(token[:, None], self._cache.positions(), state, depth)
            out = self.drafter.step(inputs, self._cache)
            assert out.hidden is not None
            state = out.hidden
            token = chooser.pick(self._head(out.readout[:, 0]))
        return chooser.proposal()

    def _propose_tree(self, rows: Sequence[Row], k: int, tree: TreeShape | DynamicTree) -> Proposal:
        count = len(rows)
        logits = self._head(self._readout[:count])
        state = self._hidden[:count, None]

        def step(tokens: Tensor, parents: Tensor, sees: Tensor, offset: int, depth: int) -> Tensor:
            nonlocal state
            self._cache.begin(count, tokens.shape[1], tail_mask=sees, offset=offset)
            index = parents[..., None].expand(count, -1, state.shape[2])
            inputs = DraftInputs(tokens, self._cache.positions(), state.gather(1, index), depth)
            out = self.drafter.step(inputs, self._cache)
            assert out.hidden is not None
            state = out.hidden
            return self._head(out.readout)

        if isinstance(tree, DynamicTree):
            return grow_dynamic(tree, min(k, tree.depth), rows, logits, step, self.drafter.vocab_map).proposal
        return grow_static(tree.cut(k), rows, logits, step, self.drafter.vocab_map, self.sampled).proposal

    def move_row(self, source: int, destination: int) -> None:
        """Row `source` takes the place of `destination`."""
        self._cache.move_row(source, destination)
        self._hidden[destination] = self._hidden[source]
        self._readout[destination] = self._readout[source]

    def memory_bytes(self) -> int:
        """Weights, cache and state, in bytes."""
        weights = sum(p.numel() * p.element_size() for p in self.drafter.parameters())
        cache = self._cache.bytes() if hasattr(self, "_cache") else 0
        return weights + cache
