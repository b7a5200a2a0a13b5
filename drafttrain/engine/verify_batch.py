"""One verdict for a batch whose rows were drafted, or are decided about, in different ways."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.engine.sampling import SamplingParams, Stream
from drafttrain.engine.tree import Tree, ancestors
from drafttrain.engine.typical import verify_typical
from drafttrain.engine.verify import Part, Proposal, Verdict, verify_chain
from drafttrain.engine.verify_kernels import reject_by_kernel
from drafttrain.engine.verify_tree import verify_tree
from drafttrain.ops.backend import Impl, use_triton


def side_by_side(parts: Sequence[Part], rows: int) -> Proposal:
    """One proposal of rows that were drafted in different ways. Chains become paths where any part is a tree.

    Args:
        parts: their rows together are 0 .. rows - 1, each once.
        rows: how many there are.
    """
    if len(parts) == 1:
        return parts[0].proposal
    device = parts[0].proposal.tokens.device
    width = max(part.proposal.tokens.shape[1] for part in parts)
    tokens = torch.zeros(rows, width, dtype=torch.int64, device=device)
    counts = torch.zeros(rows, dtype=torch.int64)
    parents = torch.arange(width, device=device).repeat(rows, 1)
    depths = parents + 1
    for part in parts:
        here, proposal = part.rows.to(device), part.proposal
        own = proposal.tokens.shape[1]
        tokens[here, :own] = proposal.tokens
        counts[part.rows] = proposal.counts
        if proposal.tree is not None:
            # What a row does not fill hangs from the root, deeper than anything it has: it is never counted.
            parents[here], depths[here] = 0, width
            parents[here, :own], depths[here, :own] = proposal.tree.parents, proposal.tree.depths
    is_tree = any(part.proposal.tree is not None for part in parts)
    tree = Tree(parents, depths, ancestors(parents)) if is_tree else None
    return Proposal(tokens, counts, tree=tree, parts=parts)


def verify_batch(
    logits: Tensor,
    proposal: Proposal,
    params: Sequence[SamplingParams],
    streams: Sequence[Stream | None],
    impl: Impl = "auto",
) -> Verdict:
    """Check proposals against the target; every row is decided about as if it were alone.

    Args:
        logits: [n, K+1, V], the target's after the root and after each draft token.
        proposal: chains, trees, or both side by side.
        params, streams: one a row; a greedy row needs no stream.
        impl: of the walk along drafts that were sampled; "auto" takes the kernel on CUDA.
    """
    parts = list(proposal.parts) or [Part(torch.arange(len(proposal.tokens)), proposal)]
    if any(p.lossy for p in params):
        parts = [half for part in parts for half in _by_rule(part, params)]
    if len(parts) == 1:
        return _verify(logits, parts[0].proposal, params, streams, impl)
    accepted = torch.zeros(len(logits), dtype=torch.int64)
    bonus = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    paths = []
    for part in parts:
        own = part.rows.tolist()
        here = part.rows.to(logits.device)
        seen = logits[here, : part.proposal.tokens.shape[1] + 1]
        verdict = _verify(seen, part.proposal, [params[i] for i in own], [streams[i] for i in own], impl)
        accepted[part.rows], bonus[here] = verdict.accepted, verdict.bonus
        paths.append(verdict.path)
    if proposal.tree is None:
        return Verdict(accepted, bonus)
    path = torch.arange(int(accepted.max()) + 1).repeat(len(logits), 1)
    for part, own_path in zip(parts, paths, strict=True):
        if own_path is not None:
            path[part.rows, : own_path.shape[1]] = own_path
    return Verdict(accepted, bonus, path)


def _verify(
    logits: Tensor,
    proposal: Proposal,
    params: Sequence[SamplingParams],
    streams: Sequence[Stream | None],
    impl: Impl,
) -> Verdict:
    if any(p.lossy for p in params):
        return verify_typical(logits, proposal, params, streams)
    sampled = proposal.q is not None and proposal.tokens.shape[1] > 0 and not all(p.greedy for p in params)
    if sampled and use_triton("tree_walk", impl, logits.device):
        return reject_by_kernel(logits, proposal, params, streams)
    # Rows without room for a node are chains of none.
    rule = verify_chain if proposal.tree is None or not proposal.tokens.shape[1] else verify_tree
    return rule(logits, proposal, params, streams)


def _by_rule(part: Part, params: Sequence[SamplingParams]) -> list[Part]:
    """The rows that follow the target's distribution, and those that asked not to."""
    lossy = torch.tensor([params[row].lossy for row in part.rows.tolist()])
    halves = []
    for mask in (lossy, ~lossy):
        index = mask.nonzero()[:, 0]
        if len(index):
            halves.append(Part(part.rows[index], part.proposal.of(index)))
    return halves
