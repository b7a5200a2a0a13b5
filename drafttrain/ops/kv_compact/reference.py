"""The definition, with an indexed copy."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(store: Tensor, lengths: Tensor, source: Tensor, first_row: int) -> None:
    """store [L, 2, rows, Hkv, S, D], lengths [n], source [n, m]; in place."""
    rows = first_row + torch.arange(len(source), device=store.device)[:, None]
    new = lengths[:, None] + torch.arange(source.shape[1], device=store.device)
    store[:, :, rows, :, new] = store[:, :, rows, :, lengths[:, None] + source]
