"""EAGLE's drafting without the host."""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.drafters.base import DraftInputs
from drafttrain.drafters.eagle.base import EagleDrafter
from drafttrain.engine.proposers.device_draft import DeviceDraft, Drafted
from drafttrain.engine.proposers.grow import grow_best, grow_dynamic_on_device
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.modeling.head import Head
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import Tap


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
