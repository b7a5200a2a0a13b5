"""Which sub-layers a target can do without when it drafts for itself (Draft & Verify, arXiv 2309.08168)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.course import Course
from drafttrain.modeling.kv_cache import StaticKVCache

SubLayer = tuple[str, int]
"""("attention" or "mlp", block)."""

_LONGEST = 8


@dataclass(frozen=True)
class Skips:
    """Sub-layers left out, and what that is expected to be worth.

    Attributes:
        attention, mlp: blocks.
        agreement: share of the answers' tokens that the thinned target would have written.
        cost: its share of the target's weights.
        k: the chain length that pays most.
        speedup: expected with it, verification taken to cost what a plain forward does.
    """

    attention: tuple[int, ...]
    mlp: tuple[int, ...]
    agreement: float
    cost: float
    k: int
    speedup: float


class _TeacherForced(StaticKVCache):
    """The target's own keys and values of a text, and behind them a draft's of its last tokens, each of which sees the
    target's before its place and its own: every place is a round's first draft."""

    def positions(self) -> Tensor:
        """int64 [1, n_new]."""
        return torch.arange(int(self.lengths[0]) - self._n_new, int(self.lengths[0]), device=self.device)[None]

    def mask(self, window: int | None = None) -> Tensor:
        """bool [1, 1, n_new, S]."""
        own = self.positions()[0][:, None]
        before = torch.arange(int(self.lengths[0]), device=self.device)[None]
        sees = before < own
        if window is not None:
            sees &= before > own - window
        return torch.cat([sees, torch.eye(self._n_new, dtype=torch.bool, device=self.device)], 1)[None, None]


class _Calibration:
    """Answers of the target with its keys and values, on which thinned targets are tried."""

    def __init__(self, target: CausalLM, answers: Sequence[tuple[list[int], list[int]]]) -> None:
        self.target = target
        self._texts: list[tuple[_TeacherForced, Tensor, Tensor]] = []
        for prompt, answer in answers:
            if len(answer) < 2:
                continue
            ids = torch.tensor(prompt + answer[:-1], device=target.device)[None]
            plain = target.new_cache(1, ids.shape[1])
            plain.begin(1, ids.shape[1])
            target(ids, cache=plain)
            cache = target.new_cache_of(_TeacherForced, 1, ids.shape[1] + len(answer))
            for ours, theirs in zip((*cache.k, *cache.v), (*plain.k, *plain.v), strict=True):
                ours[:, :, : ids.shape[1]] = theirs
            cache.lengths[0] = ids.shape[1]
            # The draft reads all of the answer but its last token, and should write all but its first.
            read = ids[:, len(prompt) :]
            self._texts.append((cache, read, torch.tensor(answer[1:], device=target.device)))
        if not self._texts:
            raise EngineError("no answer is long enough to calibrate with", remedy="give prompts with longer answers")

    def agreement(self, course: Course) -> float:
        """Share of the answers' tokens that the thinned target writes."""
        right = total = 0
        for cache, read, labels in self._texts:
            cache.begin(1, read.shape[1])
            states = self.target(read, cache=cache, course=course).final
            right += int((self.target.lm_head(states)[0].argmax(-1) == labels).sum())
            total += len(labels)
        return right / total


@torch.inference_mode()
def search_skips(
    target: CausalLM,
    answers: Sequence[tuple[list[int], list[int]]],
    evaluations: int = 200,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Skips:
    """Look for the sub-layers whose absence pays most.

    Each is left out alone; then all in the order of what they cost against what they are missed; then single changes
    to the best set found are tried.

    Args:
        target: prepared for inference.
        answers: (prompt ids, greedy answer ids); a calibration set, not the prompts that are reported on.
        evaluations: forwards over the set.
        seed: of the changes tried.
        progress: told (evaluations done, all).

    Raises:
        EngineError: the answers are too short, or fewer evaluations than twice the sub-layers are allowed.
    """
    weights = _weights(target)
    if evaluations < 2 * len(weights):
        raise EngineError(
            f"{evaluations} evaluations are too few for {len(weights)} sub-layers",
            remedy=f"allow {2 * len(weights)} or more",
        )
    calibration = _Calibration(target, answers)
    head = target.head().weight.numel()
    tried: dict[frozenset[SubLayer], Skips] = {}

    def value(skipped: frozenset[SubLayer]) -> Skips:
        if skipped not in tried:
            attention, mlp = (tuple(sorted(b for kind, b in skipped if kind == wanted)) for wanted in _KINDS)
            agreement = calibration.agreement(Course(no_attention=frozenset(attention), no_mlp=frozenset(mlp)))
            left = sum(size for layer, size in weights.items() if layer not in skipped)
            cost = (left + head) / (sum(weights.values()) + head)
            tried[skipped] = Skips(attention, mlp, agreement, cost, *_best_k(agreement, cost))
            if progress is not None:
                progress(len(tried), evaluations)
        return tried[skipped]

    missed = {layer: (1 - value(frozenset({layer})).agreement) / size for layer, size in weights.items()}
    order = sorted(weights, key=missed.__getitem__)
    best = max((frozenset(order[:count]) for count in range(1, len(order))), key=lambda s: value(s).speedup)
    chance = random.Random(seed)
    stale = 0
    while len(tried) < evaluations and stale < 4 * len(weights):
        change = frozenset(chance.sample(order, chance.choice((1, 2))))
        other = best ^ change
        # A set that was tried before is no news.
        stale += 1
        if other and other not in tried and value(other).speedup > tried[best].speedup:
            best, stale = other, 0
    return value(best)


_KINDS = ("attention", "mlp")


def _weights(target: CausalLM) -> dict[SubLayer, int]:
    sizes: dict[SubLayer, int] = {}
    for block, layer in enumerate(target.layers):
        for kind, name in zip(_KINDS, ("self_attn", "mlp"), strict=True):
            part = getattr(layer, name, None)
            if isinstance(part, nn.Module):
                sizes[kind, block] = sum(p.numel() for p in part.parameters())
    return sizes


def _best_k(agreement: float, cost: float) -> tuple[int, float]:
    """Chains of i.i.d. acceptance a: (1 - a^(k+1)) / (1 - a) tokens for k drafts and a verification."""
    rates = []
    for k in range(1, _LONGEST + 1):
        tokens = sum(agreement**depth for depth in range(k + 1))
        rates.append((tokens / (1 + k * cost), k))
    speedup, k = max(rates)
    return k, speedup
