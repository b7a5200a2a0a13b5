"""Which draft tokens the target keeps, and the token it adds. Outputs follow the target's distribution exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.engine.sampling import SamplingParams, draw, probabilities, uniforms
from drafttrain.engine.tree import Tree
from drafttrain.modeling.vocab_map import VocabMap


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
    """

    tokens: Tensor
    counts: Tensor
    q: Tensor | None = None
    vocab_map: VocabMap | None = None
    tree: Tree | None = None

    def deepest(self) -> Tensor:
        """int64 [n] on the CPU: depth of each row's last token that counts, 0 without one."""
        if self.tree is None:
            return self.counts
        depths = torch.nn.functional.pad(self.tree.depths.cpu(), (1, 0)).expand(len(self.counts), -1)
        return depths.gather(1, self.counts[:, None])[:, 0]


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
    generators: Sequence[torch.Generator | None],
) -> Verdict:
    """Check chains against the target.

    Args:
        logits: [n, K+1, V], the target's logits after the root and after each draft token.
        proposal: the chains.
        params, generators: one a row; a greedy row needs no generator.
    """
    if all(p.greedy for p in params):
        return _match(logits.argmax(-1), proposal)
    p = probabilities(logits, params)
    if proposal.q is None:
        # y ~ p at each node; walk on while y equals the draft's token: lossless without further argument.
        chosen = draw(p, uniforms(generators, p.shape[1]))
        return _match(chosen, proposal)
    return _reject(p, proposal, uniforms(generators, proposal.tokens.shape[1] + 1))


def _match(chosen: Tensor, proposal: Proposal) -> Verdict:
    length = proposal.tokens.shape[1]
    inside = torch.arange(length) < proposal.counts[:, None]
    agrees = (chosen[:, :length] == proposal.tokens) & inside.to(chosen.device)
    accepted = agrees.long().cumprod(1).sum(1)
    return Verdict(accepted.cpu(), chosen.gather(1, accepted[:, None])[:, 0])


def _reject(p: Tensor, proposal: Proposal, uniform: Tensor) -> Verdict:
    """Speculative sampling (arXiv 2211.17192, 2302.01318)."""
    assert proposal.q is not None and proposal.vocab_map is not None
    tokens, q, vocab = proposal.tokens, proposal.q, proposal.vocab_map
    length = tokens.shape[1]
    inside = (torch.arange(length) < proposal.counts[:, None]).to(p.device)
    own = vocab.to_draft.to(q.device)[tokens]
    q_x = q.gather(2, own[..., None])[..., 0].double()
    p_x = p[:, :length].gather(2, tokens[..., None])[..., 0].double()
    # accept x with probability min(1, p(x) / q(x))
    # The first uniform is the last decision's: its place must not depend on how long other rows' chains are.
    keeps = (uniform[:, 1:].to(p.device) * q_x < p_x) & inside
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
    return Verdict(accepted.cpu(), draw(target, uniform[:, 0]))
