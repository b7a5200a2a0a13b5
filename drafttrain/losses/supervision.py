"""Which labels are trained on: those that a draft would ever propose.

A round's root x_r was emitted by the target; a draft at depth k proposes x_{r+1+k}. So label x_j is
supervised at depth k if its root x_{j-1-k} and all tokens from it to the label lie in one assistant span. The
first token of a span is the target's own (it ends the prefill), hence a span 4..8 gives the labels 5..8 at
depth 0 and 6..8 at depth 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.drafters.base import DraftBatch


def label_mask(spans: Tensor, depth: int) -> Tensor:
    """Labels supervised at `depth`, over the label's own index j.

    Args:
        spans: int64 [B, T], 0 outside assistant spans, else a number unique in the row for each contiguous
        span. depth: k from 0.

    Returns:
        bool [B, T].
    """
    mask = torch.zeros_like(spans, dtype=torch.bool)
    shift = depth + 1
    if shift < spans.shape[1]:
        mask[:, shift:] = (spans[:, shift:] != 0) & (spans[:, shift:] == spans[:, :-shift])
    return mask


def supervised(batch: DraftBatch, depth: int) -> Tensor:
    """`label_mask` of the batch, bool [B, T], without labels whose draft would have no feature to start from.

    A draft starts at the token before its root; in a document that opens with an assistant span there is
    none.
    """
    mask = label_mask(batch.spans, depth)
    shift = depth + 2
    mask[:, :shift] = False
    if shift < mask.shape[1]:
        mask[:, shift:] &= batch.segments[:, shift:] == batch.segments[:, :-shift]
    return mask
