"""Which path of a tree the target keeps. Outputs follow the target's distribution exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.engine.sampling import SamplingParams, Stream, draw, probabilities, uniforms
from drafttrain.engine.tree import Tree
from drafttrain.engine.verify import Proposal, Verdict


def verify_tree(
    logits: Tensor,
    proposal: Proposal,
    params: Sequence[SamplingParams],
    streams: Sequence[Stream | None],
) -> Verdict:
    """Check trees against the target.

    Args:
        logits: [n, N+1, V], the target's logits after the root and after each node's path.
        proposal: the trees.
        params, streams: one a row; a greedy row needs no stream.
    """
    tree = proposal.tree
    assert tree is not None
    if all(p.greedy for p in params):
        return _match(logits.argmax(-1), proposal, tree)
    walk = _Walk(logits, proposal, tree, params)
    if proposal.q is None:
        return walk.by_drawing(uniforms(streams, int(tree.depths.max()) + 1, by_place=True))
    depth = int(tree.depths.max()) + 1
    return walk.by_rejection(uniforms(streams, proposal.tokens.shape[1]), uniforms(streams, depth, by_place=True))


def _inside(proposal: Proposal) -> Tensor:
    return (torch.arange(proposal.tokens.shape[1]) < proposal.counts[:, None]).to(proposal.tokens.device)


def _match(chosen: Tensor, proposal: Proposal, tree: Tree) -> Verdict:
    """Keep the nodes whose whole path is what the target chose [n, N+1]. Siblings differ, so it is one path."""
    parents = tree.parents.expand(len(chosen), -1)
    wrong = (chosen.gather(1, parents) != proposal.tokens) | ~_inside(proposal)
    wrong = torch.cat([wrong.new_zeros(len(wrong), 1), wrong], 1)
    kept = ~(tree.sees & wrong[:, None]).any(-1)
    accepted = kept.sum(1) - 1
    # Kept places in ascending order are the path: nodes are in level order. The others stay where they are.
    path = kept.long().argsort(dim=1, descending=True, stable=True)
    place = torch.arange(path.shape[1], device=path.device)
    path = torch.where(place <= accepted[:, None], path, place)
    bonus = chosen.gather(1, path.gather(1, accepted[:, None]))[:, 0]
    accepted = accepted.cpu()
    return Verdict(accepted, bonus, path[:, : int(accepted.max()) + 1].cpu())


class _Walk:
    """From the root down, all rows in step. Distributions are made only where a row stands: a vocabulary-sized
    softmax at every node of the tree would cost more than the target's forward on a small model."""

    def __init__(self, logits: Tensor, proposal: Proposal, tree: Tree, params: Sequence[SamplingParams]) -> None:
        self.logits, self.proposal, self.tree, self.params = logits, proposal, tree, params
        count, device = len(logits), logits.device
        self.place = torch.zeros(count, dtype=torch.int64, device=device)
        self.bonus = torch.zeros_like(self.place)
        self.accepted = torch.zeros_like(self.place)
        self.rows = torch.arange(count, device=device)
        """Rows that still walk."""
        self.path = [self.place.clone()]

    def _distributions(self) -> Tensor:
        """p [rows, V] where each of the walking rows stands."""
        logits = self.logits[self.rows, self.place[self.rows]]
        return probabilities(logits, [self.params[row] for row in self.rows.tolist()])

    def _advance(self, child: Tensor) -> None:
        """Go to these places; rows with place 0 have stopped."""
        going = child > 0
        self.rows = self.rows[going]
        self.place[self.rows] = child[going]
        self.accepted[self.rows] += 1
        if len(self.rows):
            step = torch.full_like(self.place, len(self.path))
            step[self.rows] = self.place[self.rows]
            self.path.append(step)

    def _verdict(self) -> Verdict:
        return Verdict(self.accepted.cpu(), self.bonus, torch.stack(self.path, 1).cpu())

    def by_drawing(self, uniform: Tensor) -> Verdict:
        """y ~ p where the row stands; go to the child equal to y, stop when there is none.

        Args:
            uniform: float64 [n, D+1], one a depth: what a row draws does not depend on the tree's shape.
        """
        tokens, inside = self.proposal.tokens, _inside(self.proposal)
        uniform = uniform.to(tokens.device)
        parents = self.tree.parents.expand(len(tokens), -1)
        while len(self.rows):
            rows = self.rows
            drawn = draw(self._distributions(), uniform[rows, len(self.path) - 1])
            self.bonus[rows] = drawn
            child = (parents[rows] == self.place[rows, None]) & (tokens[rows] == drawn[:, None]) & inside[rows]
            self._advance(torch.where(child.any(1), child.long().argmax(1) + 1, 0))
        return self._verdict()

    def by_rejection(self, decides: Tensor, draws: Tensor) -> Verdict:
        """Children sampled without replacement (Sequoia, arXiv 2402.12374, algorithm 2).

        Args:
            decides: float64 [n, N], one a node.
            draws: float64 [n, D+1], one a depth, for the target's own token there.
        """
        proposal, tree = self.proposal, self.tree
        assert proposal.q is not None and proposal.vocab_map is not None
        assert tree.children is not None and tree.q_rows is not None
        device = proposal.tokens.device
        vocab = proposal.vocab_map.to(device)
        decides, draws = decides.to(device), draws.to(device)
        counts = proposal.counts.to(device)
        while len(self.rows):
            rows, place = self.rows, self.place[self.rows]
            p = self._distributions()
            first_q = proposal.q[rows, tree.q_rows[place]]
            tried = torch.zeros_like(first_q, dtype=torch.bool)
            went = torch.zeros_like(place)
            for number in range(tree.children.shape[1]):
                child = tree.children[place, number]
                open_ = (went == 0) & (child > 0) & (child <= counts[rows])
                if not bool(open_.any()):
                    break
                token = proposal.tokens[rows, (child - 1).clamp(min=0)][:, None]
                q = vocab.expand(without_replacement(first_q, tried))
                p_x, q_x = p.gather(1, token)[:, 0].double(), q.gather(1, token)[:, 0].double()
                # accept x with probability min(1, p(x) / q(x))
                keeps = open_ & (decides[rows, (child - 1).clamp(min=0)] * q_x < p_x)
                went = torch.where(keeps, child, went)
                # else p <- norm((p - q)+), and x is taken out of q
                refused = open_ & ~keeps
                residual = (p - q).clamp_(min=0)
                total = residual.sum(-1, keepdim=True)
                # p = q up to rounding leaves nothing: then a rejection has probability zero and p itself is right.
                p = torch.where(refused[:, None] & (total > 0), residual / total.clamp(min=1e-30), p)
                own = vocab.to_draft[token]
                tried.scatter_(1, own, tried.gather(1, own) | refused[:, None])
            stopped = went == 0
            self.bonus[rows[stopped]] = draw(p[stopped], draws[rows[stopped], len(self.path) - 1])
            self._advance(went)
        return self._verdict()


def without_replacement(q: Tensor, tried: Tensor) -> Tensor:
    """The distribution of the next child.

    Args:
        q: [..., V], that of the first.
        tried: bool [..., V], the elder siblings' tokens.

    Returns:
        q without them, normalised; uniform over the untried where nothing is left of q.
    """
    left = q.masked_fill(tried, 0.0)
    total = left.sum(-1, keepdim=True)
    empty = total <= 0
    if bool(empty.any()):
        left = torch.where(empty, (~tried).to(q.dtype), left)
        total = left.sum(-1, keepdim=True)
    return left / total
