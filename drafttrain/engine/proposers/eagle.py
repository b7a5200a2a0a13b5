"""Chains and trees from a draft that predicts features (EAGLE-1, EAGLE-3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttrain.drafters.base import DraftInputs
from drafttrain.drafters.eagle.base import EagleDrafter
from drafttrain.engine.proposers.base import Proposer, Row
from drafttrain.engine.proposers.choose import Chooser
from drafttrain.engine.proposers.device_draft import DeviceDraft
from drafttrain.engine.proposers.grow import grow_dynamic, grow_static
from drafttrain.engine.proposers.on_device import EagleOnDevice
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.engine.verify import Proposal
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import Tap
from drafttrain.ops.tree_attention import MAX_TAIL

_BACKLOG = 32
"""Tokens of a row that may be put off."""


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

    def _length(self, length: int) -> int:
        ahead = 0 if self.tree is None else self.tree.read_ahead
        # What is put off is read by all rows in step: those at their end are written behind it.
        return length + ahead + (_BACKLOG if self.lazy else 0)

    def bytes_needed(self, rows: int, length: int) -> int:
        """Of the cache and the state, in bytes."""
        token: StaticKVCache = self.drafter.new_cache(1, 1)
        state = 2 * self.drafter.arch.hidden_size * self.drafter.dtype().itemsize
        return rows * (self._length(length) * token.bytes() + state)

    def reserve(self, rows: int, length: int) -> None:
        """Allocate for `rows` rows of up to `length` tokens."""
        self._cache: StaticKVCache = self.drafter.new_cache(rows, self._length(length))
        self._backlog: list[list[Tensor]] = [[] for _ in range(rows)]
        size = self.drafter.arch.hidden_size
        self._hidden = torch.zeros(rows, size, dtype=self.drafter.dtype(), device=self._cache.device)
        self._readout = torch.zeros_like(self._hidden)

    def admit(self, first_row: int, rows: Sequence[Row], features: dict[Tap, Tensor]) -> None:
        """Make the slots of the prompts."""
        lengths = torch.tensor([len(row.tokens) - 1 for row in rows])
        self._cache.set_lengths(torch.zeros_like(lengths), first_row)
        self._backlog[first_row : first_row + len(rows)] = [[] for _ in rows]
        self._extend(first_row, rows, self._joined(features, int(lengths.max())), lengths)

    def observe(
        self,
        rows: Sequence[Row],
        features: dict[Tap, Tensor],
        accepted: Tensor,
        path: Tensor | None = None,
        own: Tensor | None = None,
    ) -> None:
        """Make the slots of the root and the accepted tokens, this time from the target's features."""
        joined = self._joined(features, int(accepted.max()) + 1)
        if not self.lazy:
            self._extend(0, rows, joined, accepted + 1)
            return
        if max(sum(map(len, parts)) for parts in self._backlog) + joined.shape[1] > _BACKLOG:
            self._catch_up(rows)
        for row, count in enumerate(accepted.tolist()):
            self._backlog[row].append(joined[row, : count + 1])

    def _catch_up(self, rows: Sequence[Row]) -> None:
        """Make the slots that were put off, of all rows in one step."""
        if not self.lazy:
            return
        counts = torch.tensor([sum(map(len, parts)) for parts in self._backlog[: len(rows)]])
        if int(counts.max()) == 0:
            return
        nothing = next(part for parts in self._backlog for part in parts)[:0]
        joined = pad_sequence([torch.cat([nothing, *parts]) for parts in self._backlog[: len(rows)]], batch_first=True)
        self._backlog = [[] for _ in self._backlog]
        self._extend(0, rows, joined, counts)

    def _joined(self, features: dict[Tap, Tensor], longest: int) -> Tensor:
        """The taps' first `longest` states side by side, [n, longest, taps * H]."""
        taps = [features[tap][:, :longest] for tap in self.feature_spec.taps]
        return taps[0] if len(taps) == 1 else torch.cat(taps, -1)

    def _extend(self, first: int, rows: Sequence[Row], joined: Tensor, counts: Tensor) -> None:
        longest = int(counts.max())
        device = self._cache.device
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        for index, (row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            # The tokens one behind each feature, up to the new root. A row that stopped early holds fewer.
            start = int(self._cache.lengths[first + index]) + 1
            following = row.tokens[start : start + count]
            tokens[index, : len(following)] = torch.tensor(following, dtype=torch.int64)
        self._cache.begin(len(rows), longest, first_row=first)
        out = self.drafter.step(DraftInputs(tokens.to(device), self._cache.positions(), joined), self._cache)
        self._cache.commit(counts)
        assert out.hidden is not None
        each = counts.nonzero()[:, 0]
        last, each = (counts[each] - 1).to(device), each.to(device)
        self._hidden[first + each] = out.hidden[each, last]
        self._readout[first + each] = out.readout[each, last]

    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """k recurrent steps."""
        self._catch_up(rows)
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

    def on_device(self, k: int) -> DeviceDraft | None:
        """The same steps without the host, where what is read ahead fits a packed mask."""
        if self.tree is not None and self.tree.read_ahead > MAX_TAIL:
            return None
        return EagleOnDevice(self.drafter, self._head, self._cache, self._hidden, self._readout, self.tree, k)

    def move_row(self, source: int, destination: int) -> None:
        """Row `source` takes the place of `destination`."""
        self._cache.move_row(source, destination)
        self._hidden[destination] = self._hidden[source]
        self._readout[destination] = self._readout[source]
        self._backlog[destination], self._backlog[source] = self._backlog[source], []

    def memory_bytes(self) -> int:
        """Weights, cache and state, in bytes."""
        weights = sum(p.numel() * p.element_size() for p in self.drafter.parameters())
        cache = self._cache.bytes() if hasattr(self, "_cache") else 0
        return weights + cache
