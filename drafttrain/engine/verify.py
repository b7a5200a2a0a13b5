"""Which draft tokens the target keeps, and the token it adds. Outputs follow the target's distribution exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from drafttrain.engine.sampling import SamplingParams, Stream, draw, probabilities, uniforms
from drafttrain.engine.tree import Tree
from drafttrain.modeling.course import Course
from drafttrain.modeling.vocab_map import VocabMap


class Resume(NamedTuple):
    """A forward that is done in part: the blocks to come, and the states [n, K+1, H] at the root and all tokens that
    the first of them reads. The cache holds the keys and values of the blocks before it."""

    course: Course
    states: Tensor


@dataclass
class Proposal:
    """Chains or trees of draft tokens.

    Attributes:
        tokens: int64 [n, K], target ids; the children of a node differ.
        counts: int64 [n] on the CPU, how many of a row's tokens count: the first ones.
        q: float32 [n, K, Vd], the distribution each token was sampled from, or None where the draft chose it
            deterministically. In a tree, row `tree.q_rows[place]` is what the children of a place were sampled from,
            one after the other without replacement.
        vocab_map: maps q's last axis to the target's vocabulary.
        tree: ancestry of the tokens; None = chains.
        parts: where rows were drafted in different ways, each way's rows and their proposal; tokens, counts and tree
            are then all of them side by side, and q is None.
        resume: of chains that the target's first blocks drafted, where its forward may go on from.
    """

    tokens: Tensor
    counts: Tensor
    q: Tensor | None = None
    vocab_map: VocabMap | None = None
    tree: Tree | None = None
    parts: Sequence[Part] = ()
    resume: Resume | None = None

    def deepest(self) -> Tensor:
        """int64 [n] on the CPU: depth of each row's last token that counts, 0 without one."""
        if self.tree is None:
            return self.counts
        depths = torch.nn.functional.pad(self.tree.depths.cpu(), (1, 0)).expand(len(self.counts), -1)
        return depths.gather(1, self.counts[:, None])[:, 0]

    def within(self, room: Tensor) -> Proposal:
        """Cut to at most room[b] tokens deep (int64 [n] on the CPU)."""
        if self.tree is None:
            counts = torch.minimum(self.counts, room)
        else:
            # In level order, what a row has room for comes first.
            counts = torch.minimum(self.counts, (self.tree.depths.cpu() <= room[:, None]).sum(1))
        width = int(counts.max())
        return replace(
            self,
            tokens=self.tokens[:, :width],
            counts=counts,
            q=self.q if self.q is None or self.tree is not None else self.q[:, :width],
            tree=None if self.tree is None else self.tree.first(width),
            parts=[Part(part.rows, part.proposal.within(room[part.rows])) for part in self.parts],
            resume=None if self.resume is None else self.resume._replace(states=self.resume.states[:, : width + 1]),
        )

    def to(self, device: torch.device) -> Proposal:
        """On the device of the target, wherever the draft lives."""
        if self.tokens.device == device:
            return self
        tree = self.tree
        return replace(
            self,
            tokens=self.tokens.to(device),
            q=None if self.q is None else self.q.to(device),
            tree=None if tree is None else Tree(*(None if field is None else field.to(device) for field in tree)),  # type: ignore[arg-type]
            parts=[Part(part.rows, part.proposal.to(device)) for part in self.parts],
        )

    def of(self, rows: Tensor) -> Proposal:
        """The proposals of some rows (int64 [m] on the CPU); of one way of drafting."""
        here = rows.to(self.tokens.device)
        tree = self.tree
        if tree is not None and len(tree.parents) > 1:
            tree = tree._replace(parents=tree.parents[here], depths=tree.depths[here], sees=tree.sees[here])
        return replace(
            self,
            tokens=self.tokens[here],
            counts=self.counts[rows],
            q=None if self.q is None else self.q[here],
            tree=tree,
            resume=None,
        )


@dataclass
class Part:
    """Rows (int64 [m] on the CPU) that were drafted in one way, and their proposal."""

    rows: Tensor
    proposal: Proposal


@dataclass
class Verdict:
    """What the target made of a proposal.

    Attributes:
        accepted: int64 [n] on the CPU, draft tokens kept.
        bonus: int64 [n], the target's own token behind them.
        path: of a tree, int64 [n, m] on the CPU: places of the root and the kept tokens, m - 1 being the most kept in
            any row; entries j beyond a row's own are j. None = chains.
    """

    accepted: Tensor
    bonus: Tensor
    path: Tensor | None = None


def verify_chain(
    logits: Tensor,
    proposal: Proposal,
    params: Sequence[SamplingParams],
    streams: Sequence[Stream | None],
) -> Verdict:
    """Check chains against the target.

    Args:
        logits: [n, K+1, V], the target's logits after the root and after each draft token.
        proposal: the chains.
        params, streams: one a row; a greedy row needs no stream.
    """
    if all(p.greedy for p in params):
        return _match(logits.argmax(-1), proposal)
    p = probabilities(logits, params)
    if proposal.q is None:
        # y ~ p at each node; walk on while y equals the draft's token: lossless without further argument.
        chosen = draw(p, uniforms(streams, p.shape[1], by_place=True))
        return _match(chosen, proposal)
    decides = uniforms(streams, proposal.tokens.shape[1])
    return _reject(p, proposal, decides, uniforms(streams, p.shape[1], by_place=True))


def _match(chosen: Tensor, proposal: Proposal) -> Verdict:
    length = proposal.tokens.shape[1]
    inside = torch.arange(length) < proposal.counts[:, None]
    agrees = (chosen[:, :length] == proposal.tokens) & inside.to(chosen.device)
    accepted = agrees.long().cumprod(1).sum(1)
    return Verdict(accepted.cpu(), chosen.gather(1, accepted[:, None])[:, 0])


def _reject(p: Tensor, proposal: Proposal, decides: Tensor, draws: Tensor) -> Verdict:
    """Speculative sampling (arXiv 2211.17192, 2302.01318). float64 `decides` [n, K] about drafts, `draws` [n, K+1]."""
    assert proposal.q is not None and proposal.vocab_map is not None
    tokens, q, vocab = proposal.tokens, proposal.q, proposal.vocab_map
    length = tokens.shape[1]
    inside = (torch.arange(length) < proposal.counts[:, None]).to(p.device)
    own = vocab.to_draft.to(q.device)[tokens]
    q_x = q.gather(2, own[..., None])[..., 0].double()
    p_x = p[:, :length].gather(2, tokens[..., None])[..., 0].double()
    # accept x with probability min(1, p(x) / q(x))
    keeps = (decides.to(p.device) * q_x < p_x) & inside
    accepted = keeps.long().cumprod(1).sum(1)
    target = p.gather(1, accepted[:, None, None].expand(-1, 1, p.shape[2]))[:, 0]
    refused = (accepted < proposal.counts.to(p.device)).nonzero()[:, 0]
    if len(refused):
        # else draw from norm((p - q)+)
        drafted = vocab.expand(q[refused, accepted[refused]])
        residual = (target[refused] - drafted).clamp_(min=0)
        # p = q up to rounding leaves nothing: then a rejection has probability zero and p itself is right.
        empty = residual.sum(-1, keepdim=True) <= 0
        target[refused] = torch.where(empty, target[refused], residual)
    uniform = draws.to(p.device).gather(1, accepted[:, None])[:, 0]
    return Verdict(accepted.cpu(), draw(target, uniform))
