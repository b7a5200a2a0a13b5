"""Drafting without the host: what a round proposes stays on the device, in shapes that do not change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from drafttrain.drafters.base import DraftInputs
from drafttrain.drafters.eagle.base import EagleDrafter
from drafttrain.engine.proposers.grow import grow_best, grow_dynamic_on_device
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.modeling.head import Head
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import FeatureSpec, Tap


class Drafted(NamedTuple):
    """Chains or trees of n rows, all on the device.

    Attributes:
        tokens: int64 [n, N], target ids.
        counts: int64 [n], how many of them count: the first ones.
        parents, depths: int64 [n or 1, N], the place of each node's parent, 0 = the root, and its depth, from 1.
        sees: bool [n or 1, N + 1, N + 1] over places, the root and the ancestors of each; None = chains.
    """

    tokens: Tensor
    counts: Tensor
    parents: Tensor
    depths: Tensor
    sees: Tensor | None


class DeviceDraft(ABC):
    """A greedy draft whose rounds do not synchronise. It shares its state with the proposer it came from.

    Attributes:
        feature_spec: what it reads of the target.
        reach: depth of the deepest node it proposes.
    """

    feature_spec: FeatureSpec
    reach: int

    @abstractmethod
    def draft(self, lengths: Tensor, room: Tensor) -> Drafted:
        """Propose for rows 0 .. n - 1.

        Args:
            lengths: int64 [n], tokens before each row's root.
            room: int64 [n], the deepest node that a row can keep.
        """

    @abstractmethod
    def observe(self, lengths: Tensor, following: Tensor, features: dict[Tap, Tensor], accepted: Tensor) -> None:
        """After a round.

        Args:
            lengths: as for `draft`.
            following: int64 [n, reach + 1], the kept tokens and the new root behind them.
            features: [n, reach + 1, H] a tap, at the old root and along the path that was kept.
            accepted: int64 [n], kept tokens.
        """

    @abstractmethod
    def commit(self, accepted: Tensor) -> None:
        """The host has read what was kept of rows 0 .. n - 1 (int64 [n] on the CPU)."""


class EagleOnDevice(DeviceDraft):
    """EAGLE's steps, for chains, static and dynamic trees.

    Args:
        drafter: the draft.
        head: its head, prepared.
        cache: its slots.
        hidden, readout: [rows, H], the state after each row's last slot; written by `observe`.
        tree: what to propose; None = chains of `k`.
        k: length of chains.
    """

    def __init__(
        self,
        drafter: EagleDrafter[object],
        head: Head,
        cache: StaticKVCache,
        hidden: Tensor,
        readout: Tensor,
        tree: TreeShape | DynamicTree | None,
        k: int,
    ) -> None:
        self.drafter, self.head, self.cache = drafter, head, cache
        self.hidden, self.readout, self.tree = hidden, readout, tree
        self.feature_spec = drafter.feature_spec
        self.reach = k if tree is None else tree.depth

    def draft(self, lengths: Tensor, room: Tensor) -> Drafted:
        """`reach` recurrent steps, or the levels of the tree."""
        rows = len(lengths)
        logits = self.head(self.readout[:rows])
        if self.tree is None:
            return self._chain(lengths, room, logits)
        state = self.hidden[:rows, None]

        def step(tokens: Tensor, parents: Tensor, sees: Tensor, offset: int, depth: int) -> Tensor:
            nonlocal state
            self.cache.begin_on_device(lengths, tokens.shape[1], sees, offset=offset)
            index = parents[..., None].expand(rows, -1, state.shape[2])
            state, readout = self._step(tokens, state.gather(1, index), depth)
            return self.head(readout)

        vocab_map = self.drafter.vocab_map
        if isinstance(self.tree, DynamicTree):
            tokens, counts, tree, _ = grow_dynamic_on_device(self.tree, self.reach, room, logits, step, vocab_map)
        else:
            tokens, tree, _ = grow_best(self.tree, logits, step, vocab_map)
            counts = (tree.depths <= room[:, None]).sum(1)
        return Drafted(tokens, counts, tree.parents, tree.depths, tree.sees)

    def _chain(self, lengths: Tensor, room: Tensor, logits: Tensor) -> Drafted:
        rows = len(lengths)
        state = self.hidden[:rows, None]
        tokens = []
        for depth in range(1, self.reach + 1):
            tokens.append(self.drafter.vocab_map.to_target(logits.argmax(-1)))
            if depth < self.reach:
                self.cache.begin_on_device(lengths, 1, offset=depth - 1)
                hidden, readout = self._step(tokens[-1][:, None], state, depth)
                state, logits = hidden, self.head(readout[:, 0])
        parents = torch.arange(self.reach, device=lengths.device)[None]
        return Drafted(torch.stack(tokens, 1), room.clamp(0, self.reach), parents, parents + 1, None)

    def _step(self, tokens: Tensor, state: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        out = self.drafter.step(DraftInputs(tokens, self.cache.positions(), state, depth), self.cache)
        assert out.hidden is not None
        return out.hidden, out.readout

    def observe(self, lengths: Tensor, following: Tensor, features: dict[Tap, Tensor], accepted: Tensor) -> None:
        """Make the slots of the root and the accepted tokens, from the target's features."""
        rows = len(lengths)
        self.cache.begin_on_device(lengths, following.shape[1])
        taps = [features[tap] for tap in self.feature_spec.taps]
        joined = taps[0] if len(taps) == 1 else torch.cat(taps, -1)
        hidden, readout = self._step(following, joined, 0)
        each = torch.arange(rows, device=lengths.device)
        self.hidden[:rows] = hidden[each, accepted]
        self.readout[:rows] = readout[each, accepted]

    def commit(self, accepted: Tensor) -> None:
        """Count the slots of the root and the accepted tokens."""
        self.cache.lengths[: len(accepted)] += accepted + 1
