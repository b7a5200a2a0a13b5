"""The definitions, all rows in step. n rows, N nodes, V target and Vd draft vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops.tree_walk.types import Family, Walk


def walk_by_match(chosen: Tensor, tokens: Tensor, counts: Tensor, parents: Tensor, reach: int) -> Walk:
    """As `dispatch.walk_by_match`."""
    rows = torch.arange(len(tokens), device=tokens.device)
    place = torch.zeros_like(rows)
    accepted = torch.zeros_like(rows)
    path = torch.arange(reach + 1, device=tokens.device).repeat(len(rows), 1)
    inside = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
    for depth in range(1, reach + 1):
        fits = (parents == place[:, None]) & (tokens == chosen[rows, place][:, None]) & inside
        # A row that has stopped finds no child again.
        found = fits.any(1) & (accepted == depth - 1)
        place = torch.where(found, fits.long().argmax(1) + 1, place)
        path[:, depth] = torch.where(found, place, path[:, depth])
        accepted = accepted + found
    return Walk(accepted, chosen[rows, place], path)


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
    """As `dispatch.walk_by_rejection`."""
    rows = torch.arange(len(tokens), device=tokens.device)
    place, accepted, bonus = (torch.zeros_like(rows) for _ in range(3))
    path = torch.arange(draws.shape[1], device=tokens.device).repeat(len(rows), 1)
    walking = torch.ones_like(rows, dtype=torch.bool)
    inside = to_draft >= 0
    for depth in range(draws.shape[1]):
        left = p[rows, place]
        first = torch.where(inside, q[rows, family.q_rows[place]][:, to_draft.clamp(min=0)], 0.0)
        tried = torch.zeros_like(inside).repeat(len(rows), 1)
        went = torch.zeros_like(place)
        for number in range(family.children.shape[1]):
            child = family.children[place, number]
            asked = walking & (went == 0) & (child > 0) & (child <= counts)
            token = tokens[rows, (child - 1).clamp(min=0)]
            # The draft's distribution without the elder siblings; uniform where they held all of it.
            rest = first.masked_fill(tried, 0.0)
            empty = rest.sum(1, keepdim=True) <= 0
            rest = torch.where(empty & (number > 0), (inside & ~tried).to(rest.dtype), rest)
            rest = rest / rest.sum(1, keepdim=True) if number else rest
            keeps = decides[rows, (child - 1).clamp(min=0)] * rest[rows, token].double() < left[rows, token].double()
            went = torch.where(asked & keeps, child, went)
            refused = asked & ~keeps
            residual = (left - rest).clamp(min=0)
            total = residual.sum(1, keepdim=True)
            # p = q up to rounding leaves nothing: then a rejection has probability zero and p itself is right.
            left = torch.where(refused[:, None] & (total > 0), residual / total.clamp(min=1e-30), left)
            tried[rows, token] |= refused
        stopped = walking & (went == 0)
        bonus = torch.where(stopped, _draw(left, draws[:, depth]), bonus)
        walking = walking & (went > 0)
        accepted = accepted + walking
        place = torch.where(walking, went, place)
        if depth + 1 < draws.shape[1]:
            path[:, depth + 1] = torch.where(walking, went, path[:, depth + 1])
    return Walk(accepted, bonus, path)


def _draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling, never a token of weight zero: weights [n, V], uniform float64 [n] -> int64 [n]."""
    cumulative = weights.double().cumsum(-1)
    total = cumulative[:, -1:]
    threshold = (uniform[:, None] * total).minimum(torch.nextafter(total, total - 1))
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]
