"""Attention over a cache on CPUs whose result for a token has the same bits however many tokens and rows are computed
with it ("batch invariance").

So a verification rounds as plain decoding does, and a chain of accepted drafts is plain decoding's text in bf16, too,
where near-ties are common. torch's kernel rounds by the shape of its products: the last few queries go another way, and
so do sums over some numbers of keys. Which, depends on the processor and on the width of a head (an AMD EPYC sums 384
keys as it sums 512, an Intel Xeon does not; with heads of 128 that takes eight queries at least). So shapes are tried
when they are first wanted, and those that round alike are used. Where none do, near-ties may go either way, as in any
engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

# Entries of a mask at most, of a row and in all: a prompt of 1,024 tokens. Longer ones take the causal kernel, which
# leaves half of the products out.
_MOST_OF_ROW, _MOST = 2**20, 2**23

# The kernel reads keys by 512, and queries by 32, from 192 on by 64.
_READ = 512
_REST = range(64, _READ + 1, 64)
_QUERIES = (4, 8, 16, 32)

_recent: tuple[tuple[ref[Tensor], tuple[int, int, torch.dtype], Tensor], ...] = ()


@dataclass(frozen=True)
class Shapes:
    """Shapes of attention in which a query's sums go the same way.

    Attributes:
        queries: their number is a multiple of this.
        rest: numbers of keys behind the last whole 512, ascending, 512 the last of them.
    """

    queries: int
    rest: tuple[int, ...]

    def keys(self, length: int) -> int:
        """How many keys to attend over where `length` are wanted; the mask hides the rest."""
        whole = (length - 1) // _READ * _READ
        return whole + next(size for size in self.rest if size >= length - whole)


def shapes_for(widths: Iterable[tuple[int, int]], dtype: torch.dtype) -> Shapes | None:
    """Shapes that suit layers of all these widths (of a key, of a value) at once; None where there are none."""
    return _common(frozenset(widths), dtype)


@cache
def _common(widths: frozenset[tuple[int, int]], dtype: torch.dtype) -> Shapes | None:
    each = [_found(*width, dtype) for width in sorted(widths)]
    shapes = [found for found in each if found is not None]
    if not shapes or len(shapes) < len(each):
        return None
    rest = set(_REST).intersection(*(found.rest for found in shapes))
    return Shapes(max(found.queries for found in shapes), tuple(sorted(rest)))


@cache
def _found(dim: int, value_dim: int, dtype: torch.dtype) -> Shapes | None:
    return next((found for queries in _QUERIES if (found := _try(queries, dim, value_dim, dtype))), None)


@torch.inference_mode()
def _try(queries: int, dim: int, value_dim: int, dtype: torch.dtype) -> Shapes | None:
    """What rounds alike here if queries come in multiples of so many."""
    counts = (queries, 2 * queries, 32 + queries, 192 + queries)
    heads = min(8, max(2, 256 // dim))
    generator = torch.Generator().manual_seed(0)
    sizes = ((counts[-1], dim), (2 * _READ, dim), (2 * _READ, value_dim))
    q, k, v = (torch.randn(1, heads, *size, generator=generator).to(dtype) for size in sizes)

    def attend(keys: int, seen: int, rows: slice, of: int = heads, cancel: bool = False) -> Tensor:
        mask = torch.zeros(1, 1, rows.stop - rows.start, keys, dtype=dtype)
        mask[..., seen:] = -torch.inf
        part_k, part_v = k, v
        if cancel:
            # The second half takes back what the first gave: what is left is the rounding of the sums.
            half, rest = seen // 2, 2 * _READ - seen
            part_k = torch.cat((k[:, :, :half], k[:, :, :half], k[:, :, :rest]), 2)
            part_v = torch.cat((v[:, :, :half], -v[:, :, :half], v[:, :, :rest]), 2)
        parts = q[:, :of, rows], part_k[:, :of, :keys], part_v[:, :of, :keys]
        return F.scaled_dot_product_attention(*parts, attn_mask=mask, scale=dim**-0.5)

    def alike(keys: int, seen: int, expected: Tensor, cancel: bool = False) -> bool:
        return all(
            torch.equal(attend(keys, seen, slice(0, count), cancel=cancel), expected[:, :, :count]) for count in counts
        )

    for seen in (100, _READ - 4):
        starts = range(0, counts[-1], queries)
        parts = [attend(_READ, seen, slice(start, start + queries)) for start in starts]
        # A head alone is not left to a thread of its own.
        alone = attend(_READ, seen, slice(0, queries), of=1)
        if not alike(_READ, seen, torch.cat(parts, 2)) or not torch.equal(alone, parts[0][:, :1]):
            return None
    rest = []
    for size in _REST:
        for seen in (size - 36, size, _READ + size - 12):
            keys = size if seen <= _READ else _READ + size
            whole = -(-seen // _READ) * _READ
            if not all(
                alike(keys, seen, attend(whole, seen, slice(0, counts[-1]), cancel=cancel), cancel)
                for cancel in (False, True)
            ):
                break
        else:
            rest.append(size)
    return Shapes(queries, tuple(rest)) if _READ in rest else None


def fits(rows: int, n_new: int, keys: int) -> bool:
    """Whether a mask of this size is small enough."""
    entries = n_new * keys
    return entries <= _MOST_OF_ROW and rows * entries <= _MOST


def takes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether `decode_attention` computes this."""
    if (
        mask is None
        or q.device.type != "cpu"
        or mask.dtype != torch.bool
        or not fits(len(mask), *mask.shape[2:])
        or torch.is_grad_enabled()
    ):
        return False
    shapes = _found(k.shape[-1], v.shape[-1], q.dtype)
    return shapes is not None and k.shape[2] == shapes.keys(k.shape[2])


def decode_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Grouped-query attention where `takes` holds. There is no gradient.

    Args:
        q: [B, Hq, T, D].
        k: [B, Hkv, S, D], S as `Shapes.keys` gives it.
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
    shapes = _found(dim, v.shape[-1], q.dtype)
    assert shapes is not None
    more = -(group * n_new) % shapes.queries
    if more:
        folded = F.pad(folded, (0, 0, 0, more))
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=_scores(mask, group, more, q.dtype), scale=scale)
    if more:
        out = out[:, :, : group * n_new]
    return out.reshape(batch, q_heads, n_new, v.shape[-1])


def _scores(mask: Tensor, group: int, more: int, dtype: torch.dtype) -> Tensor:
    """What a mask adds to the scores of a group's queries and `more` that nobody asks for, [B or 1, 1, M, S]; made once
    for the layers that share it."""
    global _recent
    recent, wanted = _recent, (group, more, dtype)
    for of, made_for, made in recent:
        if of() is mask and made_for == wanted:
            return made
    hidden = torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, -torch.inf).repeat(1, 1, group, 1)
    made = F.pad(hidden, (0, 0, 0, more))
    # One read and one write of the name: another thread finds masks that are whole.
    _recent = ((ref(mask, _forget), wanted, made), *recent[:2])
    return made


def _forget(mask: ref[Tensor]) -> None:
    global _recent
    _recent = tuple(entry for entry in _recent if entry[0] is not mask)
