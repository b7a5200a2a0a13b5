"""Typical acceptance (Medusa, arXiv 2401.10774, section 2.3.1). Lossy: only for requests that ask for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.engine.sampling import SamplingParams, Stream, Typical, draw, probabilities, uniforms
from drafttrain.engine.verify import Proposal, Verdict


def verify_typical(
    logits: Tensor,
    proposal: Proposal,
    params: Sequence[SamplingParams],
    streams: Sequence[Stream | None],
) -> Verdict:
    """Keep the deepest path whose tokens are all typical enough; outputs do NOT follow the target's distribution.

    Args:
        logits: [n, K+1, V], the target's after the root and after each draft token.
        proposal: chains or trees.
        params: each with `typical` set and a temperature above 0.
        streams: one a row.
    """
    p = probabilities(logits, params)
    count, length = proposal.tokens.shape
    device = p.device
    rules = [rule.typical or Typical() for rule in params]
    epsilon, delta = (
        torch.tensor([getattr(rule, name) for rule in rules], device=device)[:, None] for name in ("epsilon", "delta")
    )
    entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)
    # keep x if p(x) > min(epsilon, delta exp(-H(p)))
    threshold = torch.minimum(epsilon, delta * torch.exp(-entropy))
    tree = proposal.tree
    parents = (torch.arange(length, device=device) if tree is None else tree.parents).expand(count, -1)
    p_x = p.gather(1, parents[..., None].expand(-1, -1, p.shape[2])).gather(2, proposal.tokens[..., None])[..., 0]
    inside = (torch.arange(length) < proposal.counts[:, None]).to(device)
    keeps = (p_x > threshold.gather(1, parents)) & inside
    uniform = uniforms(streams, length + 1, by_place=True).to(device)
    if tree is None:
        accepted = keeps.long().cumprod(1).sum(1)
        last, path = accepted, None
    else:
        wrong = torch.cat([keeps.new_zeros(count, 1), ~keeps], 1)
        whole = ~(tree.sees & wrong[:, None]).any(-1)
        depths = torch.nn.functional.pad(tree.depths, (1, 0)).expand(count, -1)
        # The deepest; of several the first, which is the draft's likeliest.
        last = torch.where(whole, depths, -1).argmax(1)
        accepted = depths.gather(1, last[:, None])[:, 0]
        on_path = tree.sees.expand(count, -1, -1)[torch.arange(count, device=device), last]
        order = on_path.long().argsort(dim=1, descending=True, stable=True)
        place = torch.arange(length + 1, device=device)
        path = torch.where(place <= accepted[:, None], order, place)[:, : int(accepted.max()) + 1].cpu()
    each = torch.arange(count, device=device)
    bonus = draw(p[each, last], uniform[each, accepted])
    return Verdict(accepted.cpu(), bonus, path)
