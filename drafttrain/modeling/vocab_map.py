"""The draft's vocabulary: a subset of the target's, and the maps between the two.

EAGLE-3 (arXiv 2503.01840) lets the draft's head cover only the target's most frequent tokens. Serving engines
load the map as `d2t`, int64 OFFSETS (target id = draft id + d2t[draft id]), and `t2d`, a bool mask over the
target's ids.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class VocabMap:
    """Which target ids the draft can say. Draft ids are in ascending order of target id when built here.

    Args:
        d2t: int64 [Vd], offsets: target id = i + d2t[i].
        t2d: bool [V], true where the target id is in the draft's vocabulary.

    Raises:
        ValueError: the two disagree, or d2t holds absolute ids, repeats or ids out of range.
    """

    def __init__(self, d2t: Tensor, t2d: Tensor) -> None:
        self.d2t = d2t.to(torch.int64)
        self.t2d = t2d.to(torch.bool)
        self._target_ids: Tensor | None = None
        self._to_draft: Tensor | None = None
        if not self.d2t.is_meta:
            self._check()

    def _check(self) -> None:
        ids = self.target_ids
        if ids.dim() != 1 or self.t2d.dim() != 1:
            raise ValueError("d2t and t2d are one-dimensional")
        inside = bool(ids.numel()) and int(ids.min()) >= 0 and int(ids.max()) < self.vocab_size
        if not inside or torch.unique(ids).numel() != ids.numel():
            if looks_absolute(self.d2t, self.t2d):
                raise ValueError("d2t holds absolute target ids; it must hold offsets: target id = i + d2t[i]")
            raise ValueError(f"d2t is no map into {self.vocab_size} target ids: out of range or repeated ids")
        mask = torch.zeros_like(self.t2d)
        mask[ids] = True
        if not torch.equal(mask, self.t2d):
            if looks_absolute(self.d2t, self.t2d):
                raise ValueError("d2t holds absolute target ids; it must hold offsets: target id = i + d2t[i]")
            raise ValueError("d2t and t2d name different sets of target ids")

    @staticmethod
    def full(vocab_size: int) -> VocabMap:
        """The draft says everything the target says."""
        return VocabMap(torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool))

    @staticmethod
    def from_ids(ids: Iterable[int] | Tensor, vocab_size: int) -> VocabMap:
        """The map onto the given distinct target ids, sorted."""
        chosen = torch.as_tensor(list(ids) if not isinstance(ids, Tensor) else ids, dtype=torch.int64)
        chosen = torch.sort(chosen.cpu()).values
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[chosen] = True
        return VocabMap(chosen - torch.arange(chosen.numel()), t2d)

    @staticmethod
    def from_counts(
        counts: Tensor, size: int, always: Iterable[int] = (), tokenizer_size: int | None = None
    ) -> VocabMap:
        """The `size` most frequent tokens; `always` are in whatever their count.

        Where fewer distinct tokens were seen, the lowest unseen ids fill up (in byte-pair vocabularies low
        ids are the earliest, most frequent merges).

        Args:
            counts: [V] how often the target says each token.
            size: Vd.
            always: target ids that must be in, such as eos and the template's special tokens.
            tokenizer_size: ids from here on are padding of the target's vocabulary and are never taken.

        Raises:
            ValueError: `size` is no possible vocabulary, or `always` does not fit.
        """
        vocab_size = counts.numel()
        usable = min(vocab_size, tokenizer_size if tokenizer_size is not None else vocab_size)
        must = sorted(set(always))
        if not 0 < size <= vocab_size:
            raise ValueError(f"a draft vocabulary of {size} is impossible: the target has {vocab_size} tokens")
        if any(not 0 <= token < usable for token in must):
            raise ValueError(f"token ids {[t for t in must if not 0 <= t < usable]} are outside the tokenizer")
        size = min(size, usable)
        if len(must) > size:
            raise ValueError(f"{len(must)} tokens must be in a draft vocabulary of {size}: make it larger")
        rank = counts[:usable].detach().to("cpu", torch.float64).clone()
        rank[must] = torch.inf
        order = torch.sort(rank, descending=True, stable=True).indices
        return VocabMap.from_ids(order[:size], vocab_size)

    @property
    def size(self) -> int:
        """Vd."""
        return int(self.d2t.numel())

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.t2d.numel())

    @property
    def is_full(self) -> bool:
        """Draft and target ids are the same."""
        return self.size == self.vocab_size

    @property
    def target_ids(self) -> Tensor:
        """int64 [Vd], the target id of each draft id."""
        if self._target_ids is None:
            self._target_ids = self.d2t + torch.arange(self.size, device=self.d2t.device)
        return self._target_ids

    @property
    def to_draft(self) -> Tensor:
        """int64 [V], the draft id of each target id, -1 outside."""
        if self._to_draft is None:
            table = torch.full((self.vocab_size,), -1, dtype=torch.int64, device=self.d2t.device)
            table[self.target_ids] = torch.arange(self.size, device=self.d2t.device)
            self._to_draft = table
        return self._to_draft

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids [...] -> target ids [...]."""
        return draft_ids if self.is_full else draft_ids + self.d2t[draft_ids]

    def restrict(self, logits: Tensor) -> Tensor:
        """[..., V] -> [..., Vd], the columns that the draft can say."""
        return logits if self.is_full else logits[..., self.target_ids]

    def expand(self, probs: Tensor) -> Tensor:
        """[..., Vd] -> [..., V], zero outside the draft's vocabulary."""
        if self.is_full:
            return probs
        wide = probs.new_zeros((*probs.shape[:-1], self.vocab_size))
        wide[..., self.target_ids] = probs
        return wide

    def coverage(self, counts: Tensor) -> float:
        """Share of the counted tokens [V] that the draft can say (0 when nothing was counted)."""
        total = float(counts.sum())
        return float(counts.to(self.t2d.device)[self.t2d].sum()) / total if total else 0.0

    def to(self, device: torch.device | str) -> VocabMap:
        """The same map on another device."""
        if self.d2t.device == torch.device(device):
            return self
        moved = VocabMap.__new__(VocabMap)
        moved.d2t, moved.t2d = self.d2t.to(device), self.t2d.to(device)
        moved._target_ids = moved._to_draft = None
        return moved

    def state(self) -> dict[str, Tensor]:
        """The tensors that are saved: d2t and t2d."""
        return {"d2t": self.d2t.cpu(), "t2d": self.t2d.cpu()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VocabMap):
            return NotImplemented
        return torch.equal(self.d2t.cpu(), other.d2t.cpu()) and torch.equal(self.t2d.cpu(), other.t2d.cpu())

    def __hash__(self) -> int:
        return hash((self.size, self.vocab_size))

    def __repr__(self) -> str:
        return f"VocabMap({self.size} of {self.vocab_size})"


def looks_absolute(d2t: Tensor, t2d: Tensor) -> bool:
    """Whether a d2t tensor holds absolute target ids instead of offsets: some exporters write them."""
    if d2t.numel() != int(t2d.sum()) or not bool(d2t.numel()):
        return False
    return torch.equal(torch.sort(d2t.cpu().to(torch.int64)).values, torch.nonzero(t2d.cpu()).flatten())
