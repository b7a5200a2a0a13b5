"""The definition, with explicit scores.

Legend: B rows, Hq query heads, Hkv key heads (G = Hq / Hkv), T slots, D head width, K recurrent steps so far.

At step K the query of slot t sees
    - the step-0 keys of slots 0..t of its own document, and
    - the keys of steps 1..K of its own slot only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reference(q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], segments: Tensor | None, scale: float) -> Tensor:
    """q [B, Hq, T, D], ks and vs [B, Hkv, T, D] each, segments [B, T] or None -> [B, Hq, T, D].

    Materialises [B, Hq, T, T + K] scores; the softmax runs in fp32 at least.
    """
    groups = q.shape[1] // ks[0].shape[1]
    keys = [k.repeat_interleave(groups, dim=1) for k in ks]
    values = [v.repeat_interleave(groups, dim=1) for v in vs]
    length = q.shape[2]

    visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    if segments is not None:
        visible = visible & (segments[:, None, :, None] == segments[:, None, None, :])
    first = (scale * (q @ keys[0].transpose(-1, -2))).masked_fill(~visible, float("-inf"))
    own = [scale * (q * k).sum(-1, keepdim=True) for k in keys[1:]]
    scores = torch.cat([first, *own], dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)

    out = weights[..., :length] @ values[0]
    for step, v in enumerate(values[1:]):
        out = out + weights[..., length + step, None] * v
    return out
