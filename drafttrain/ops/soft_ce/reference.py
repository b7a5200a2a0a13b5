"""The definition."""

from __future__ import annotations

import torch
from torch import Tensor


def soft_ce(draft: Tensor, target: Tensor, divergence: bool, weight: float, gradient: bool) -> tuple[Tensor, Tensor]:
    """As `dispatch.soft_ce`."""
    wide = torch.promote_types(draft.dtype, torch.float32)
    log_q, log_p = draft.to(wide).log_softmax(-1), target.to(wide).log_softmax(-1)
    p = log_p.exp()
    value = (p * ((log_p if divergence else 0.0) - log_q)).sum(-1)
    top = draft.argmax(-1)
    if gradient:
        draft.copy_(weight * (log_q.exp() - p))
    return value, top
