"""What each query of a tree sees, in three or four integers instead of a row of a mask.

Behind `prefix` tokens that every query of a row sees lie `tail` slots: the uncommitted tokens, each of which sees
those of its ancestors, itself included. Ancestors come in the order of their slots. A packed mask has four dimensions,
as transformers demands of a mask that it hands through, and is int64 where a plain one is bool.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_TAIL = 64
"""Slots of the tail: the bits of one int64."""


def is_packed(mask: Tensor) -> bool:
    """Whether a mask is a packed one."""
    return mask.dtype == torch.int64


def pack(sees: Tensor, prefix: Tensor, window: int | None = None) -> Tensor:
    """Pack a mask.

    Args:
        sees: bool [B or 1, T, tail], which slots of the tail each query sees; tail <= 64.
        prefix: int64 [B], tokens before the tail, on the same device.
        window: sliding window in tokens along a path, the query included, or None.

    Returns:
        int64 [B, 1, T, 3], or [..., 4] with a window: bits, prefix, tail, window. No synchronisation.
    """
    _, queries, tail = sees.shape
    if tail > MAX_TAIL:
        raise ValueError(f"a tail of {tail} tokens; it has at most {MAX_TAIL}")
    place = torch.arange(tail, device=sees.device)
    # A sum of distinct powers of two is their union; the 64th wraps to the sign bit, as it should.
    bits = (sees.long() << place).sum(-1)
    rows = prefix.shape[0]
    fields = [bits.expand(rows, queries), prefix[:, None].expand(rows, queries)]
    fields += [torch.full_like(fields[0], value) for value in (tail, window) if value is not None]
    return torch.stack(fields, -1)[:, None].contiguous()


def unpack(packed: Tensor, visible: int) -> Tensor:
    """The mask as bool [B, 1, T, visible] over the slots of a cache."""
    bits, prefix, tail = (packed[..., field, None] for field in range(3))
    column = torch.arange(visible, device=packed.device)
    slot = column - prefix
    own = (bits >> slot.clamp(0, MAX_TAIL - 1)) & 1
    inside = (slot >= 0) & (slot < tail)
    seen = (slot < 0) | (inside & (own == 1))
    if packed.shape[-1] == 4:
        window = packed[..., 3, None]
        each = (bits >> torch.arange(MAX_TAIL, device=packed.device)) & 1
        # How many ancestors lie from a slot up to the query, both included.
        behind = each.flip(-1).cumsum(-1).flip(-1)
        position = prefix - 1 + behind[..., :1]
        near = behind.gather(-1, slot.clamp(0, MAX_TAIL - 1).expand(*behind.shape[:-1], visible)) <= window
        seen = seen & torch.where(slot < 0, column > position - window, near)
    return seen
