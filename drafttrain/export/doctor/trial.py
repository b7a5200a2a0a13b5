"""What a draft accepts, on the target's own greedy answers: played through on paper, as fast as a forward.

A draft is unrolled over whole answers as in training, and rounds are read off: a draft token counts while all before
it in its round are the target's. That gives the very rounds that an engine serves (`eval/parity.py`), so that dozens of
readings of one folder can be compared on the same positions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from drafttrain.drafters.base import DraftBatch, Drafter
from drafttrain.engine.engine import Engine
from drafttrain.engine.records import Request
from drafttrain.errors import EngineError
from drafttrain.export.prove.bundled import room
from drafttrain.export.prove.server import Counters
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import Tap


@dataclass(frozen=True)
class Accepted:
    """What a draft accepts.

    Attributes:
        runs: int64, for each emitted token of all answers as the root of a round: draft tokens accepted behind it.
        counters: of the rounds that an engine would play.
    """

    runs: Tensor
    counters: Counters

    @property
    def per_round(self) -> float:
        """Accepted draft tokens a round."""
        return self.counters.accepted / self.counters.drafts if self.counters.drafts else 0.0

    @property
    def first(self) -> float:
        """Share of rounds whose first draft token is accepted."""
        return self.counters.per_position[0] / self.counters.drafts if self.counters.drafts else 0.0

    def beats(self, other: Accepted, gain: float = 1.1, z: float = 3.0) -> bool:
        """Whether it accepts more, by a share that matters and on more roots than chance would give.

        A sign test over the roots at which the two differ: both were tried at the same places.
        """
        better, worse = int((self.runs > other.runs).sum()), int((self.runs < other.runs).sum())
        if better + worse == 0 or self.per_round < gain * other.per_round:
            return False
        return (better - worse) / math.sqrt(better + worse) >= z


class Answers:
    """The target's greedy answers to some prompts, and its states on them, computed once each.

    Args:
        target: frozen.
        prompts: token ids, at least one each.
        k: draft tokens a round.
        max_new_tokens: of an answer.
        stop_ids: tokens that end one and are its last.
        rows: prompts answered together.

    Raises:
        EngineError: prompts that leave no room in the target's context.
    """

    def __init__(
        self,
        target: CausalLM,
        prompts: Sequence[Sequence[int]],
        *,
        k: int,
        max_new_tokens: int,
        stop_ids: Set[int] = frozenset(),
        rows: int = 8,
    ) -> None:
        self.target, self.prompts, self.k = target, prompts, k
        # Behind the end, too: the last rounds of an answer draft past it.
        length = max(map(len, prompts)) + max_new_tokens + room(k)
        engine = Engine(target, max_batch=min(rows, len(prompts)), max_length=length)
        if engine.max_length < length:
            raise EngineError(
                f"the longest prompt, {max_new_tokens} tokens and a round of {k} need {length} tokens, the target's "
                f"context has {engine.max_length}",
                remedy="shorten the prompts, or give a smaller --max-new-tokens",
            )
        requests = [Request(str(i), list(ids), max_new_tokens + room(k)) for i, ids in enumerate(prompts)]
        answers = [completion.tokens for completion in engine.generate(requests)]
        self.documents = [torch.tensor([*ids, *answer]) for ids, answer in zip(prompts, answers, strict=True)]
        self.outputs = []
        for answer in answers:
            kept = answer[:max_new_tokens]
            end = next((i + 1 for i, token in enumerate(kept) if token in stop_ids), len(kept))
            self.outputs.append(kept[:end])
        self._groups = [range(i, min(i + rows, len(prompts))) for i in range(0, len(prompts), rows)]
        self._states: dict[tuple[int, Tap], Tensor] = {}

    @torch.inference_mode()
    def accepted(self, drafter: Drafter) -> Accepted:
        """Play a draft through.

        Args:
            drafter: bound to the target, in its dtype.
        """
        drafter.eval()
        k = min(self.k, drafter.max_depth) if drafter.family == "medusa" else self.k
        runs, rounds = [], []
        for group in self._groups:
            for index, hits in zip(group, self._hits(drafter, group, k), strict=True):
                first = len(self.prompts[index])
                leading = hits.int().cumprod(-1).sum(-1).tolist()
                roots = range(first, first + len(self.outputs[index]) - 1)
                runs += [leading[root] for root in roots]
                root = first
                while root in roots:
                    rounds.append(leading[root])
                    root += leading[root] + 1
        per_position = [sum(kept > depth for kept in rounds) for depth in range(k)]
        return Accepted(torch.tensor(runs), Counters(len(rounds), len(rounds) * k, sum(per_position), per_position))

    def _hits(self, drafter: Drafter, group: range, k: int) -> Tensor:
        """bool [B, T, k]: whether the token at depth d behind root r is the draft's."""
        batch = self._batch(drafter, group)
        ids = batch.tokens
        length = ids.shape[1]
        hits = torch.zeros(*ids.shape, k, dtype=torch.bool, device=ids.device)
        is_lm = drafter.family == "draft_lm"
        for out in drafter.unroll(batch, 1 if is_lm else k):
            guess = drafter.head(out.depth)(out.readout).argmax(-1)
            guess = drafter.vocab_map.to(guess.device).to_target(guess)
            if is_lm:
                # Slot t predicts t + 1: with all before it right, depth d behind root r is slot r + d.
                right = guess[:, :-1] == ids[:, 1:]
                for depth in range(min(k, length - 1)):
                    hits[:, : length - 1 - depth, depth] = right[:, depth:]
            else:
                # Slot r - 1 holds root r, and at depth d predicts the token d + 1 behind it.
                reach = length - 2 - out.depth
                hits[:, 1 : reach + 1, out.depth] = guess[:, :reach] == ids[:, 2 + out.depth :]
        return hits.cpu()

    def _batch(self, drafter: Drafter, group: range) -> DraftBatch:
        """The documents of a group, padded on the right."""
        taps, device = drafter.feature_spec.taps, self.target.device
        documents = [self.documents[index] for index in group]
        ids = pad_sequence(documents, batch_first=True).to(device)
        lengths = torch.tensor([len(document) for document in documents], device=device)
        positions = torch.arange(ids.shape[1], device=device).expand_as(ids)
        segments = torch.where(positions < lengths[:, None], 0, -1)
        missing = [tap for tap in taps if (group.start, tap) not in self._states]
        if missing:
            output = self.target(ids, taps=missing)
            self._states.update({(group.start, tap): output.taps[tap] for tap in missing})
        states = {tap: self._states[group.start, tap] for tap in taps}
        return DraftBatch(ids, positions, segments, torch.zeros_like(ids), states)
