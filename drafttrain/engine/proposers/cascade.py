"""A draft that is itself drafted by a cheaper one, to any depth (staged speculation, arXiv 2308.04623)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from drafttrain.engine.penalty import penalised
from drafttrain.engine.proposers.base import Proposer, Reach, Row
from drafttrain.engine.proposers.draft_lm import ReaderProposer
from drafttrain.engine.proposers.readers import Reader
from drafttrain.engine.sampling import probabilities
from drafttrain.engine.verify import Proposal, Resume
from drafttrain.engine.verify_batch import verify_batch
from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import Tap


class CascadeProposer(Proposer):
    """Chains of a draft that checks a cheaper draft's chains as the target checks its own.

    The inner rounds are lossless for the draft, so its tokens are samples of its own distribution, and the target's
    verification is exact whatever the stages are worth.

    Args:
        draft: the stage that the target checks.
        cheaper: proposes to it, chains alone, from tokens alone: a lookup, a smaller draft, or a cascade.
        name: as reports show it.

    Raises:
        EngineError: the cheaper stage reads the target's features or proposes trees, or the cascade contains itself.
    """

    resumes: bool

    def __init__(self, draft: Reader, cheaper: Proposer, name: str | None = None) -> None:
        self.name = name or f"{cheaper.name} > {draft.name}"
        if cheaper.feature_spec.taps:
            raise EngineError(
                f"{cheaper.name} reads the target's features, which a stage below {draft.name} does not have",
                remedy="draft with a lookup, a draft LM or an early exit there; lookups beside EAGLE are a router",
            )
        if cheaper.tree is not None:
            raise EngineError(f"{cheaper.name} proposes trees; the stages of a cascade propose chains")
        for stage in stages(cheaper):
            if stage is draft or stage.name == draft.name:
                raise EngineError(
                    f"the cascade {self.name} contains itself: {draft.name} would draft for {draft.name}",
                    remedy="list each stage once, the cheapest first",
                )
        self.draft, self.cheaper = draft, cheaper
        self.resumes = True
        if isinstance(cheaper, ReaderProposer | CascadeProposer):
            cheaper.resumes = False
        self._inner = 0

    def reach(self, k: int) -> Reach:
        """Chains of k tokens."""
        # The last inner round of a row may overshoot by all that the cheaper stage proposes.
        self._inner = self.cheaper.reach(k).depth
        return Reach(k, k, k + 1 + self._inner)

    def attach(self, target: CausalLM, cache: StaticKVCache) -> None:
        """For stages that are a part of the target."""
        self.draft.attach(target, cache)
        self.cheaper.attach(target, cache)

    def bytes_needed(self, rows: int, length: int) -> int:
        """Of all stages, in bytes."""
        length += 1 + self._inner
        return self.draft.bytes_needed(rows, length) + self.cheaper.bytes_needed(rows, length)

    def reserve(self, rows: int, length: int) -> None:
        """Allocate for `rows` rows of up to `length` tokens."""
        length += 1 + self._inner
        self.draft.reserve(rows, length)
        self.cheaper.reserve(rows, length)

    def admit(self, first_row: int, rows: Sequence[Row], features: dict[Tap, Tensor]) -> None:
        """Read the prompts."""
        self.draft.admit(first_row, rows)
        self.cheaper.admit(first_row, rows, features)

    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """Inner rounds until every row has k tokens."""
        inner = _InnerRounds(rows, k, self.resumes)
        self.draft.start(rows)
        while (wanted := int(inner.missing().max())) > 0:
            if wanted > 1:
                # The draft's own token comes behind what it keeps.
                room = (inner.missing() - 1).clamp(min=0)
                cheap = self.cheaper.propose(inner.views, min(wanted - 1, self._inner)).within(room)
            else:
                cheap = Proposal(
                    torch.zeros(len(rows), 0, dtype=torch.int64), torch.zeros(len(rows), dtype=torch.int64)
                )
            cheap.tokens = cheap.tokens.to(self.draft.cache.device)
            logits = self.draft.extend(inner.views, cheap.tokens)
            self.draft.keep(inner.take(cheap, logits, self.draft.states))
        proposal = inner.proposal(self.draft)
        self.draft.finish()
        return proposal

    def move_row(self, source: int, destination: int) -> None:
        """Row `source` takes the place of `destination`."""
        self.draft.move_row(source, destination)
        self.cheaper.move_row(source, destination)

    def forget(self) -> None:
        """Drop what was learnt from past requests."""
        self.cheaper.forget()

    def memory_bytes(self) -> int:
        """Of all stages, in bytes."""
        return self.draft.memory_bytes() + self.cheaper.memory_bytes()


def stages(proposer: Proposer) -> list[Reader | Proposer]:
    """What a draft is made of, from the top down."""
    if isinstance(proposer, CascadeProposer):
        return [proposer.draft, *stages(proposer.cheaper)]
    return [proposer.reader] if isinstance(proposer, ReaderProposer) else [proposer]


class _InnerRounds:
    """What a draft has written behind each row in one round of the engine."""

    def __init__(self, rows: Sequence[Row], k: int, resumes: bool) -> None:
        self.resumes = resumes
        # By a row's own room: what it drafts must not depend on the rows beside it.
        self.counts = torch.tensor([max(0, min(k, row.room - 1)) for row in rows])
        # Each place of the outer text has inner streams of its own, independent of those that the target decides with.
        self.views = [
            replace(
                row,
                tokens=list(row.tokens),
                limit=row.emitted + count,
                streams=None if row.streams is None else row.streams.within(len(row.tokens)),
            )
            for row, count in zip(rows, self.counts.tolist(), strict=True)
        ]
        self.params = [replace(row.request.sampling, typical=None) for row in rows]
        self.sampled = not all(p.greedy for p in self.params)
        self._start = [len(row.tokens) for row in rows]
        self._q: list[list[Tensor]] = [[] for _ in rows]
        self._states: list[list[Tensor]] = [[] for _ in rows]

    def missing(self) -> Tensor:
        """int64 [n] on the CPU: tokens that each row lacks."""
        return torch.tensor([view.room for view in self.views])

    def take(self, cheap: Proposal, logits: Tensor, states: Tensor | None) -> Tensor:
        """Check the cheaper stage's tokens as a target would; int64 [n], how many were kept."""
        logits = penalised(logits, self.views, cheap)
        streams = [None if v.streams is None else v.streams.verdict(len(v.tokens)) for v in self.views]
        verdict = verify_batch(logits, cheap, self.params, streams)
        done = self.missing() == 0
        verdict.accepted[done] = 0
        q = probabilities(logits, self.params) if self.sampled else None
        drafts, bonus = cheap.tokens.tolist(), verdict.bonus.tolist()
        for index, (view, kept) in enumerate(zip(self.views, verdict.accepted.tolist(), strict=True)):
            if done[index]:
                continue
            view.tokens += [*drafts[index][:kept], bonus[index]]
            view.drafted += kept + 1
            if q is not None:
                self._q[index] += q[index, : kept + 1]
            if states is not None:
                self._states[index] += states[index, : kept + 1]
        return verdict.accepted

    def proposal(self, draft: Reader) -> Proposal:
        """The rows' chains."""
        device = draft.cache.device
        count, longest = len(self.views), int(self.counts.max())
        tokens = torch.zeros(count, longest, dtype=torch.int64)
        for index, (view, start) in enumerate(zip(self.views, self._start, strict=True)):
            tokens[index, : len(view.tokens) - start] = torch.tensor(view.tokens[start:], dtype=torch.int64)
        q = None
        if self.sampled:
            q = torch.zeros(count, longest, draft.vocab_map.size, device=device)
            for index, rows in enumerate(self._q):
                for place, row in enumerate(rows):
                    q[index, place] = row
        proposal = Proposal(tokens.to(device), self.counts, q, draft.vocab_map)
        if draft.course is not None and self.resumes:
            draft.cache.lengths[:count] = torch.tensor([len(view.tokens) - 1 for view in self.views])
            draft.pass_through(torch.tensor([[view.tokens[-1]] for view in self.views], device=device))
            assert draft.states is not None
            # Behind a row's own tokens anything will do that is finite.
            states = draft.states.repeat(1, longest + 1, 1)
            for index, rows in enumerate(self._states):
                for place, row in enumerate(rows):
                    states[index, place] = row
            proposal.resume = Resume(draft.course, states)
        return proposal
