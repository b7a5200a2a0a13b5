"""The definition, with explicit scores.

Legend: B rows, Hq query heads, Hkv key heads (G = Hq / Hkv), T queries, S slots of the cache, D width of a key, Dv of a
value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.ops.tree_attention.packed import unpack


def reference(q: Tensor, k: Tensor, v: Tensor, packed: Tensor, scale: float, softcap: float | None) -> Tensor:
    """q [B, Hq, T, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], packed mask -> [B, Hq, T, Dv]; scores in fp32 at least."""
    group = q.shape[1] // k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (x.to(wide).repeat_interleave(group, 1) for x in (k, v))
    scores = (q.to(wide) @ keys.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~unpack(packed, k.shape[2]), -torch.inf)
    return (scores.softmax(-1) @ values).to(q.dtype)
