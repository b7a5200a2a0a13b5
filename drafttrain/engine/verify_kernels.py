"""Sampled drafts checked by a kernel: on CUDA the walk from place to place would wait for the device at each child."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.engine.sampling import SamplingParams, Stream, probabilities, uniforms
from drafttrain.engine.verify import Proposal, Verdict
from drafttrain.ops.tree_walk import Family, Walk, chain_family, walk_by_rejection

# Probabilities held at once: 1 GiB. Rows are independent, so more of them are checked in turn.
_ENTRIES = 1 << 28


def reject_by_kernel(
    logits: Tensor,
    proposal: Proposal,
    params: Sequence[SamplingParams],
    streams: Sequence[Stream | None],
) -> Verdict:
    """Check chains or trees whose tokens were sampled, from the numbers that `verify_chain` and `verify_tree` take.

    Args:
        logits: [n, N+1, V], the target's after the root and after each draft token.
        proposal: with q.
        params, streams: one a row; a greedy row needs no stream.

    Raises:
        EngineError: a device that the kernel cannot run on.
    """
    assert proposal.q is not None and proposal.vocab_map is not None
    device, tree, nodes = logits.device, proposal.tree, proposal.tokens.shape[1]
    depth = nodes
    if tree is None:
        family = chain_family(nodes, device)
    else:
        assert tree.children is not None and tree.q_rows is not None
        family, depth = Family(tree.children.to(device), tree.q_rows.to(device)), int(tree.depths.max())
    decides, draws = uniforms(streams, nodes), uniforms(streams, depth + 1, by_place=True)
    to_draft, q = proposal.vocab_map.to_draft.to(device), proposal.q
    counts, decides, draws = (x.to(device) for x in (proposal.counts, decides, draws))
    step = max(1, _ENTRIES // logits[0].numel())
    walks = []
    for start in range(0, len(logits), step):
        own = slice(start, start + step)
        p = probabilities(logits[own], params[own])
        walks.append(
            walk_by_rejection(
                p, q[own], proposal.tokens[own], counts[own], family, to_draft, decides[own], draws[own], impl="triton"
            )
        )
    walk = Walk(*(torch.cat(parts) for parts in zip(*walks, strict=True)))
    accepted = walk.accepted.cpu()
    path = None if tree is None else walk.path[:, : int(accepted.max()) + 1].cpu()
    return Verdict(accepted, walk.bonus, path)
