"""What walks read and what they return.

Places: 0 is the root, the last emitted token; node i of a row's draft tokens has place i + 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Walk(NamedTuple):
    """Where rows came to.

    Attributes:
        accepted: int64 [n], draft tokens kept.
        bonus: int64 [n], the target's own token behind them.
        path: int64 [n, m], places of the root and the kept tokens; entries j beyond a row's own are j.
    """

    accepted: Tensor
    bonus: Tensor
    path: Tensor


class Family(NamedTuple):
    """Who was drawn from what.

    Attributes:
        children: int64 [N + 1, M], places of each place's children in the order in which they were drawn, 0 where
            there are fewer.
        q_rows: int64 [N + 1], which row of q a place's children were drawn from.
    """

    children: Tensor
    q_rows: Tensor


def chain_family(length: int, device: torch.device) -> Family:
    """Of a chain of `length` tokens: each place's child is the next."""
    place = torch.arange(length + 1, device=device)
    return Family(((place + 1) % (length + 1))[:, None], place.clamp(max=max(length - 1, 0)))
