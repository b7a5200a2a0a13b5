"""The kernels: one program a row, from the root down. A place whose first child is kept costs two loads; the vocabulary
is read only where a child is refused or the target's own token is drawn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafttrain.ops.backend import next_power_of_2
from drafttrain.ops.tree_walk.types import Family, Walk

BLOCK = 2048


@triton.jit
def _match(
    CHOSEN, TOKENS, COUNTS, PARENTS, ACCEPTED, BONUS, PATH, N, parents_row, reach,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, BLOCK)
    inside = node < tl.minimum(tl.load(COUNTS + row), N)
    tokens = tl.load(TOKENS + row * N + node, mask=inside, other=-1)
    parents = tl.load(PARENTS + row * parents_row + node, mask=inside, other=-1)
    place = tl.zeros([], tl.int32)
    accepted = tl.zeros([], tl.int32)
    going = tl.full([], 1, tl.int32)
    while going == 1:
        chosen = tl.load(CHOSEN + row * (N + 1) + place)
        fits = (parents == place) & (tokens == chosen) & inside
        child = tl.min(tl.where(fits, node + 1, BLOCK + 1), 0)
        going = ((child <= BLOCK) & (accepted < reach)).to(tl.int32)
        if going == 1:
            place = child
            accepted += 1
            tl.store(PATH + row * (reach + 1) + accepted, place.to(tl.int64))
    tl.store(ACCEPTED + row, accepted.to(tl.int64))
    tl.store(BONUS + row, tl.load(CHOSEN + row * (N + 1) + place))


@triton.jit
def _left(P, WORK, v, V, moved):
    """What is left of p at ids v: the target's distribution, or the residual after a refusal."""
    whole = tl.load(P + v, mask=v < tl.where(moved == 0, V, 0), other=0.0)
    return whole + tl.load(WORK + v, mask=v < tl.where(moved == 1, V, 0), other=0.0)


@triton.jit
def _rest(Q, TO_DRAFT, TOKENS, CHILDREN, v, V, VD, refused, scale):
    """q at target ids v without the first `refused` children, unnormalised and normalised (uniform if scale <= 0)."""
    own = tl.load(TO_DRAFT + v, mask=v < V, other=-1)
    there = own >= 0
    q = tl.load(Q + own, mask=there, other=0.0)
    for number in range(0, refused):
        there = there & (v != tl.load(TOKENS + tl.load(CHILDREN + number) - 1))
    q = tl.where(there, q, 0.0)
    flat = tl.where(there, 1.0 / (VD - refused), 0.0)
    return q, tl.where(scale > 0, q / tl.where(scale > 0, scale, 1.0), flat)


@triton.jit
def _reject(
    P, Q, TOKENS, COUNTS, CHILDREN, Q_ROWS, TO_DRAFT, DECIDES, DRAWS, WORK, ACCEPTED, BONUS, PATH,
    N, R, V, VD, depths,
    M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(COUNTS + row)
    tokens = TOKENS + row * N
    work = WORK + row * V
    place = tl.zeros([], tl.int64)
    accepted = tl.zeros([], tl.int32)
    moved = tl.zeros([], tl.int32)
    walking = tl.full([], 1, tl.int32)
    while walking == 1:
        p = P + (row * (N + 1) + place) * V
        q = Q + (row * R + tl.load(Q_ROWS + place)) * VD
        children = CHILDREN + place * M
        went = tl.zeros([], tl.int64)
        refused = tl.zeros([], tl.int32)
        moved = tl.zeros([], tl.int32)
        scale = tl.full([], 1.0, tl.float32)
        asking = tl.full([], 1, tl.int32)
        while asking == 1:
            child = tl.load(children + refused)
            if (child > 0) & (child <= count):
                token = tl.load(tokens + child - 1)
                p_x = _left(p, work, token, V, moved)
                q_x = tl.load(q + tl.load(TO_DRAFT + token))
                q_x = tl.where(scale > 0, q_x / tl.where(scale > 0, scale, 1.0), 1.0 / (VD - refused))
                decides = tl.load(DECIDES + row * N + child - 1)
                if decides * q_x.to(tl.float64) < p_x.to(tl.float64):
                    went = child
                    asking = tl.zeros([], tl.int32)
                else:
                    # p <- norm((p - q)+), then the child is taken out of q.
                    total = tl.zeros([BLOCK], tl.float32)
                    other = tl.zeros([BLOCK], tl.float32)
                    for start in range(0, V, BLOCK):
                        v = start + tl.arange(0, BLOCK)
                        q_v, rest = _rest(q, TO_DRAFT, tokens, children, v, V, VD, refused, scale)
                        total += tl.maximum(_left(p, work, v, V, moved) - rest, 0.0)
                        other += tl.where(v == token, 0.0, q_v)
                    kept = tl.sum(total, 0)
                    if kept > 0:
                        for start in range(0, V, BLOCK):
                            v = start + tl.arange(0, BLOCK)
                            q_v, rest = _rest(q, TO_DRAFT, tokens, children, v, V, VD, refused, scale)
                            residual = tl.maximum(_left(p, work, v, V, moved) - rest, 0.0) / kept
                            tl.store(work + v, residual, mask=v < V)
                        # Other threads read it from here on.
                        tl.debug_barrier()
                        moved = tl.full([], 1, tl.int32)
                    scale = tl.sum(other, 0)
                    refused += 1
                    asking = (refused < M).to(tl.int32)
            else:
                asking = tl.zeros([], tl.int32)
        walking = (went > 0).to(tl.int32)
        if went > 0:
            place = went
            accepted += 1
            tl.store(PATH + row * depths + accepted, place)

    # The target's own token, by the inverse of the cumulative sum.
    p = P + (row * (N + 1) + place) * V
    mass = tl.zeros([], tl.float64)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        mass += tl.sum(_left(p, work, v, V, moved).to(tl.float64), 0)
    threshold = tl.load(DRAWS + row * depths + accepted) * mass
    below = tl.zeros([], tl.float64)
    before = tl.zeros([], tl.int32)
    last = tl.zeros([], tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        weight = _left(p, work, v, V, moved)
        cumulative = below + tl.cumsum(weight.to(tl.float64), 0)
        before += tl.sum(((cumulative <= threshold) & (v < V)).to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0, v, 0), 0))
        below += tl.sum(weight.to(tl.float64), 0)
    # Rounding may put the threshold behind the last token that has any weight.
    tl.store(BONUS + row, tl.minimum(before, last).to(tl.int64))
    tl.store(ACCEPTED + row, accepted.to(tl.int64))


def walk_by_match(chosen: Tensor, tokens: Tensor, counts: Tensor, parents: Tensor, reach: int) -> Walk:
    """As `dispatch.walk_by_match`, whose checks it relies on."""
    rows, nodes = tokens.shape
    walk = _empty(rows, reach + 1, tokens.device)
    parents = parents.contiguous()
    _match[(rows,)](
        chosen.contiguous(), tokens.contiguous(), counts, parents, walk.accepted, walk.bonus, walk.path,
        nodes, nodes if len(parents) > 1 else 0, reach, BLOCK=next_power_of_2(max(nodes, 1)), num_warps=1,
    )  # fmt: skip
    return walk


def walk_by_rejection(
    p: Tensor,
    q: Tensor,
    tokens: Tensor,
    counts: Tensor,
    family: Family,
    to_draft: Tensor,
    decides: Tensor,
    draws: Tensor,
) -> Walk:
    """As `dispatch.walk_by_rejection`, whose checks it relies on."""
    rows, nodes = tokens.shape
    vocab = p.shape[2]
    walk = _empty(rows, draws.shape[1], p.device)
    work = torch.empty(rows, vocab, dtype=torch.float32, device=p.device)
    _reject[(rows,)](
        p.float().contiguous(), q.float().contiguous(), tokens.contiguous(), counts,
        family.children.contiguous(), family.q_rows, to_draft, decides.contiguous(), draws.contiguous(), work,
        walk.accepted, walk.bonus, walk.path,
        nodes, q.shape[1], vocab, q.shape[2], draws.shape[1],
        M=family.children.shape[1], BLOCK=min(BLOCK, next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
    return walk


def _empty(rows: int, width: int, device: torch.device) -> Walk:
    accepted, bonus = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    return Walk(accepted, bonus, torch.arange(width, device=device).repeat(rows, 1))
