"""Choice of implementation for the walks."""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops.backend import Impl, use_triton, where_it_is
from drafttrain.ops.tree_walk import reference
from drafttrain.ops.tree_walk.types import Family, Walk, chain_family

__all__ = ["Family", "Walk", "chain_family", "walk_by_match", "walk_by_rejection"]


def walk_by_match(
    chosen: Tensor, tokens: Tensor, counts: Tensor, parents: Tensor, reach: int, *, impl: Impl = "auto"
) -> Walk:
    """From the root on, go to the child that is what the target chose; stop where there is none.

    With the argmax as the choice this is greedy verification; with a sample of the target's distribution it is the
    lossless verification of drafts that were not sampled.

    Args:
        chosen: int64 [n, N + 1], the target's token behind each place.
        tokens: int64 [n, N], N <= 64; the children of a node differ.
        counts: int64 [n], how many of a row's tokens count: the first ones.
        parents: int64 [n or 1, N], the place of each node's parent, 0 = the root.
        reach: depth of the deepest node.
        impl: "auto" takes the kernel on CUDA; an explicit choice never falls back.

    Returns:
        The walk, path int64 [n, reach + 1]. Nothing here synchronises with the device.

    Raises:
        EngineError: no such `impl`, or one that cannot run here.
    """
    if use_triton("tree_walk", impl, tokens.device):
        from drafttrain.ops.tree_walk import triton

        with where_it_is(tokens):
            return triton.walk_by_match(chosen, tokens, counts, parents, reach)
    return reference.walk_by_match(chosen, tokens, counts, parents, reach)


def walk_by_rejection(
    p: Tensor,
    q: Tensor,
    tokens: Tensor,
    counts: Tensor,
    family: Family,
    to_draft: Tensor,
    decides: Tensor,
    draws: Tensor,
    *,
    impl: Impl = "auto",
) -> Walk:
    """Keep sampled drafts with probability min(1, p / q), else go on with the residual norm((p - q)+).

    A chain is the case of one child a place (arXiv 2211.17192, 2302.01318). Children of one place were drawn one after
    the other without replacement, and each refused one is taken out of q (Sequoia, arXiv 2402.12374, algorithm 2). A
    greedy row has one-hot p.

    Args:
        p: float32 [n, N + 1, V], the target's distribution behind each place.
        q: float32 [n, R, Vd], the draft's.
        tokens: int64 [n, N], target ids.
        counts: int64 [n], how many of a row's tokens count: the first ones.
        family: whose child each token is, and which row of q it was drawn from.
        to_draft: int64 [V], the draft's id of each target id, -1 outside its vocabulary.
        decides: float64 [n, N] in [0, 1), a number for each token.
        draws: float64 [n, D + 1] in [0, 1), for the target's own token at each depth; D is that of the deepest node.
        impl: "auto" takes the kernel on CUDA; an explicit choice never falls back.

    Returns:
        The walk, path int64 [n, D + 1]. The kernel does not synchronise with the device.

    Raises:
        EngineError: no such `impl`, or one that cannot run here.
    """
    if use_triton("tree_walk", impl, p.device, torch.promote_types(p.dtype, q.dtype)):
        from drafttrain.ops.tree_walk import triton

        with where_it_is(p):
            return triton.walk_by_rejection(p, q, tokens, counts, family, to_draft, decides, draws)
    return reference.walk_by_rejection(p, q, tokens, counts, family, to_draft, decides, draws)
