"""Greedy rounds whose tensors stay on the device: three graphs a batch bucket, and one synchronisation a round.

The host hands over, a row, how long its text is, its root and its room, and reads back what was kept. Between the two
it launches the draft's loop, the target's verification and the draft's reading of the target's features, one call each.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafttrain.engine.graphs import Clock, Graph, bucket_of, buckets
from drafttrain.engine.proposers.device_draft import DeviceDraft, Drafted
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import Tap
from drafttrain.ops.tree_walk import walk_by_match

Choice = Callable[[Tensor, Drafted], Tensor]
"""Logits [n, N + 1, V] and what was drafted -> the target's token behind each place, int64 [n, N + 1]."""


def best(logits: Tensor, drafted: Drafted) -> Tensor:
    """The choice of greedy decoding."""
    return logits.argmax(-1)


class RoundInput(NamedTuple):
    """Of one row: committed tokens, the last emitted token, and how many draft tokens it can keep."""

    length: int
    root: int
    room: int


class Played(NamedTuple):
    """What a round came to, on the host.

    Attributes:
        finite: whether the target's states of a row are; a row of which they are not keeps nothing.
        accepted: a number a row.
        kept: the tokens a row kept.
        bonus: the target's own token behind them.
        proposed, depths: tokens of a row that counted, and the depth of the deepest.
        draft_s, verify_s: seconds of drafting, the reading of features included, and of verification.
    """

    finite: list[bool]
    accepted: list[int]
    kept: list[list[int]]
    bonus: list[int]
    proposed: list[int]
    depths: list[int]
    draft_s: float
    verify_s: float


class DeviceRounds:
    """Plays rounds of rows 0 .. n - 1. Prompts are read, and rows moved, by the engine between rounds.

    Args:
        target: the model.
        cache: its cache; `lengths` is left to the engine.
        draft: the draft, or None for plain decoding.
        max_batch: rows at most.
        capture: record graphs on CUDA.
        choose: the target's choice; a benchmark replaces it to set the acceptance.
    """

    def __init__(
        self,
        target: CausalLM,
        cache: StaticKVCache,
        draft: DeviceDraft | None,
        max_batch: int,
        capture: bool = True,
        choose: Choice = best,
    ) -> None:
        self.target, self.cache, self.draft, self.capture, self.choose = target, cache, draft, capture, choose
        self.device = target.device
        self.sizes = buckets(max_batch)
        on_cuda = self.device.type == "cuda"
        self._host = torch.zeros(max_batch, 3, dtype=torch.int64, pin_memory=on_cuda)
        self._inputs = torch.zeros(max_batch, 3, dtype=torch.int64, device=self.device)
        self._clock = Clock(self.device)
        self._pool: Any = torch.cuda.graph_pool_handle() if on_cuda and capture else None
        self._buckets: dict[int, _Bucket] = {}

    def play(self, rows: Sequence[RoundInput]) -> Played:
        """One round. Rows that fill a bucket up are of length 0 and have no room."""
        count, size = len(rows), bucket_of(len(rows), self.sizes)
        self._host[:size] = 0
        self._host[:count] = torch.tensor(rows)
        self._inputs[:size].copy_(self._host[:size], non_blocking=True)
        if size not in self._buckets:
            self._buckets[size] = _Bucket(self, self._inputs[:size], self._pool)
        bucket = self._buckets[size]
        self._clock.mark()
        bucket.draft()
        self._clock.mark()
        verified = bucket.verify()
        self._clock.mark()
        bucket.observe()
        self._clock.mark()
        # The one synchronisation: everything above was launched without waiting.
        read = verified.report[:count].tolist()
        draft_s, verify_s, observe_s = self._clock.spans()
        return Played(
            finite=[bool(row[4]) for row in read],
            accepted=[row[0] for row in read],
            kept=[row[5 : 5 + row[0]] for row in read],
            bonus=[row[1] for row in read],
            proposed=[row[2] for row in read],
            depths=[row[3] for row in read],
            draft_s=draft_s + observe_s,
            verify_s=verify_s,
        )

    @property
    def launches(self) -> int:
        """Calls from Python into the device so far, as far as graphs count them."""
        return sum(graph.launches for b in self._buckets.values() for graph in (b.draft, b.verify, b.observe))


class _Verified(NamedTuple):
    """report: int64 [n, 5 + reach]: accepted, bonus, tokens that counted, their depth, whether states are finite, then
    the tokens of the path."""

    report: Tensor
    following: Tensor
    features: dict[Tap, Tensor]
    accepted: Tensor


class _Bucket:
    """The graphs of one batch size; each reads what the one before it left in its places."""

    def __init__(self, rounds: DeviceRounds, inputs: Tensor, pool: Any) -> None:
        # Weak: what refers to itself is collected late, and with it a cache and a pool of gigabytes.
        self._rounds: DeviceRounds = weakref.proxy(rounds)
        own: _Bucket = weakref.proxy(self)
        self._lengths, self._roots, self._room = inputs.unbind(1)
        self._drafted: Drafted
        self._verified: _Verified
        device, capture = rounds.device, rounds.capture
        self.draft = Graph(partial(_Bucket._draft, own), device, pool, capture)
        self.verify = Graph(partial(_Bucket._verify, own), device, pool, capture)
        self.observe = Graph(partial(_Bucket._observe, own), device, pool, capture)

    def _draft(self) -> None:
        draft = self._rounds.draft
        if draft is None:
            none = torch.zeros(len(self._room), 0, dtype=torch.int64, device=self._room.device)
            self._drafted = Drafted(none, self._room * 0, none[:1], none[:1], None)
        else:
            self._drafted = draft.draft(self._lengths.clone(), self._room)

    def _verify(self) -> _Verified:
        rounds, drafted = self._rounds, self._drafted
        lengths, draft = self._lengths.clone(), rounds.draft
        reach, taps = (0, ()) if draft is None else (draft.reach, draft.feature_spec.taps)
        tokens = torch.cat([self._roots[:, None], drafted.tokens], 1)
        rounds.cache.begin_on_device(lengths, tokens.shape[1], drafted.sees)
        out = rounds.target(tokens, cache=rounds.cache, taps=taps)
        finite = out.final.isfinite().flatten(1).all(1)
        whole = finite[:, None, None]
        chosen = rounds.choose(rounds.target.lm_head(torch.where(whole, out.final, 0)), drafted)
        walk = walk_by_match(chosen, drafted.tokens, drafted.counts, drafted.parents, reach)
        taken = {tap: torch.where(whole, feature, 0) for tap, feature in out.taps.items()}
        features = {tap: feature[:, : reach + 1] for tap, feature in taken.items()}
        if drafted.sees is not None:
            rounds.cache.compact_on_device(lengths, walk.path)
            each = torch.arange(len(lengths), device=lengths.device)[:, None]
            features = {tap: feature[each, walk.path] for tap, feature in taken.items()}
        kept = drafted.tokens.gather(1, walk.path[:, 1:] - 1)
        # In level order the last token that counts is the deepest.
        depths = torch.nn.functional.pad(drafted.depths, (1, 0)).expand(len(lengths), -1)
        depth = depths.gather(1, drafted.counts[:, None])
        counted = torch.stack([walk.accepted, walk.bonus, drafted.counts, depth[:, 0], finite.long()], 1)
        report = torch.cat([counted, kept], 1)
        following = torch.cat([kept, walk.bonus[:, None]], 1).scatter(1, walk.accepted[:, None], walk.bonus[:, None])
        self._verified = _Verified(report, following, features, walk.accepted)
        return self._verified

    def _observe(self) -> None:
        draft, verified = self._rounds.draft, self._verified
        if draft is not None:
            draft.observe(self._lengths.clone(), verified.following, verified.features, verified.accepted)
