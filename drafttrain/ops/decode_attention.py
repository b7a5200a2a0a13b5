"""Attention over a cache on CPUs whose result for a token has the same bits however many tokens and rows are computed
with it ("batch invariance").

So a verification rounds as plain decoding does, and a chain of accepted drafts is plain decoding's text in bf16, too,
where near-ties are common. torch's kernel rounds by the shape of its products: the last one to three queries go another
way, and so do sums over some numbers of keys. What is left out here are those shapes. That a shape is harmless is
measured (MKL and oneDNN on AVX-512), not promised: elsewhere near-ties may go either way, as in any engine.
"""

from __future__ import annotations

from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

# Entries of a mask at most, of a row and in all: a prompt of 1,024 tokens. Longer ones take the causal kernel, which
# leaves half of the products out.
_MOST_OF_ROW, _MOST = 2**20, 2**23

# The kernel reads keys by 512. Of what is left, sums over these many go the same way as far as they go.
_READ = 512
_REST = (64, 128, 192, 384, 448, 512)
_QUERIES = 4

_recent: tuple[tuple[ref[Tensor], int, Tensor], ...] = ()


def keys_for(length: int) -> int:
    """How many keys to attend over where `length` are wanted; the mask hides the rest."""
    whole = (length - 1) // _READ * _READ
    return whole + next(size for size in _REST if size >= length - whole)


def fits(rows: int, n_new: int, keys: int) -> bool:
    """Whether a mask of this size is small enough."""
    entries = n_new * keys
    return entries <= _MOST_OF_ROW and rows * entries <= _MOST


def takes(q: Tensor, k: Tensor, mask: Tensor | None) -> bool:
    """Whether `decode_attention` computes this."""
    return (
        mask is not None
        and q.device.type == "cpu"
        and mask.dtype == torch.bool
        and fits(len(mask), *mask.shape[2:])
        and k.shape[2] == keys_for(k.shape[2])
        and not torch.is_grad_enabled()
    )


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Grouped-query attention where `takes` holds. There is no gradient.

    Args:
        q: [B, Hq, T, D].
        k: [B, Hkv, S, D], S as `keys_for` gives it.
        v: [B, Hkv, S, Dv].
        mask: bool [B or 1, 1, T, S] that `fits`, True where a query may look; each may look somewhere.
        scale: factor on the scores.

    Returns:
        [B, Hq, T, Dv].
    """
    batch, q_heads, n_new, dim = q.shape
    kv_heads = k.shape[1]
    # Queries of one group share their keys: folding the group into the query axis avoids repeating K and V.
    group = q_heads // kv_heads
    folded = q.reshape(batch, kv_heads, group * n_new, dim)
    more = -(group * n_new) % _QUERIES
    if more:
        folded = F.pad(folded, (0, 0, 0, more))
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=_scores(mask, group, q.dtype), scale=scale)
    if more:
        out = out[:, :, : group * n_new]
    return out.reshape(batch, q_heads, n_new, v.shape[-1])


def _scores(mask: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """What a mask adds to the scores of a group's queries [B or 1, 1, M, S], made once for the layers that share it."""
    global _recent
    recent = _recent
    for of, made_for, made in recent:
        if of() is mask and made_for == group and made.dtype == dtype:
            return made
    hidden = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf).repeat(1, 1, group, 1)
    made = F.pad(hidden, (0, 0, 0, -hidden.shape[2] % _QUERIES))
    # One read and one write of the name: another thread finds masks that are whole.
    _recent = ((ref(mask, _forget), group, made), *recent[:2])
    return made


def _forget(mask: ref[Tensor]) -> None:
    global _recent
    _recent = tuple(entry for entry in _recent if entry[0] is not mask)
