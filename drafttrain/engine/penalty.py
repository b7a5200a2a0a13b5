"""Repetition penalty (arXiv 1909.05858), as transformers defines it, at every place of a chain or tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafttrain.engine.verify import Proposal
from drafttrain.modeling.vocab_map import VocabMap

if TYPE_CHECKING:
    from drafttrain.engine.proposers.base import Row


def penalised(logits: Tensor, rows: Sequence[Row], proposal: Proposal) -> Tensor:
    """The target's logits with the penalty of each row: for what its text holds, and its drafts up to each place.

    Args:
        logits: [n, K+1, V] after the root and after each draft token.
        rows: with the root as their last token.
        proposal: the draft tokens.

    Returns:
        the logits themselves where no row asks for it, else float32.
    """
    if all(row.request.sampling.repetition_penalty == 1 for row in rows):
        return logits
    device = logits.device
    places = logits.shape[1]
    sees = None if proposal.tree is None else proposal.tree.sees.to(device)
    chain = torch.ones(places, places, dtype=torch.bool, device=device).tril()
    out = logits.float().clone()
    for index, row in enumerate(rows):
        penalty = row.request.sampling.repetition_penalty
        if penalty == 1:
            continue
        held = torch.zeros(places, logits.shape[2], dtype=torch.bool, device=device)
        held[:, torch.tensor(row.tokens, device=device)] = True
        path = chain if sees is None else sees[index if len(sees) > 1 else 0]
        place, draft = path[:, 1:].nonzero(as_tuple=True)
        held[place, proposal.tokens[index, draft]] = True
        out[index] = lowered(out[index], held, penalty)
    return out


def lowered(logits: Tensor, held: Tensor, penalty: float | Tensor) -> Tensor:
    """logits [..., V] with those of the tokens where `held` (bool, same shape) made less likely."""
    return torch.where(held, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


class DraftPenalty:
    """The same for a draft, so that it proposes what the target may accept. It knows the rows' text and, in chains, the
    tokens picked; siblings and ancestors in a tree are left alone, which changes what is proposed and not what is kept.

    Args:
        rows: of this round.
        vocab_map: the draft's vocabulary.
    """

    def __init__(self, rows: Sequence[Row], vocab_map: VocabMap) -> None:
        self._penalties = torch.tensor([row.request.sampling.repetition_penalty for row in rows])
        self.active = bool((self._penalties != 1).any())
        if self.active:
            self._held = torch.zeros(len(rows), vocab_map.size, dtype=torch.bool)
            for index, row in enumerate(rows):
                own = vocab_map.to_draft.cpu()[torch.tensor(row.tokens)]
                self._held[index, own[own >= 0]] = True

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [n, Vd] or [n, w, Vd]."""
        if not self.active:
            return logits
        shape = (len(logits), *[1] * (logits.dim() - 2), -1)
        held = self._held.to(logits.device).view(shape)
        return lowered(logits.float(), held, self._penalties.to(logits.device).view(*shape[:-1], 1))

    def add(self, chosen: Tensor) -> None:
        """Draft ids int64 [n] that the chains go on with."""
        if self.active:
            self._held.scatter_(1, chosen.cpu()[:, None], True)
