"""Attention over cached keys and values, registered with transformers under the name "drafttrain"."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from drafttrain.modeling.documents import Documents, is_document_mask
from drafttrain.ops.decode_attention import decode_attention, takes
from drafttrain.ops.tree_attention import is_packed, tree_attention, unpack
from drafttrain.ops.ttt_attention import supported, ttt_attention

ATTENTION_NAME = "drafttrain"

_TILE = 512
"""Queries that see a sliding window at once: a mask of them and their window is all that is made."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Grouped-query attention.

    Args:
        q: [B, Hq, T, D].
        k: [B, Hkv, S, D], Hq a multiple of Hkv.
        v: [B, Hkv, S, Dv].
        mask: bool [B or 1, 1, T, S], True where a query may look; or a packed one (`ops.tree_attention`); or that
            of packed rows (`modeling.documents`), S == T; None = causal when T == S, everything when T == 1.
        scale: factor on the scores.
        softcap: c in c * tanh(scores / c) (Gemma 2), or None.
        sinks: [Hq], a score that each head weighs beside the others and that adds nothing (GPT-OSS), or None.

    Returns:
        [B, Hq, T, Dv].
    """
    if mask is not None and is_packed(mask) and sinks is None:
        return tree_attention(q, k, v, mask, scale, softcap=softcap)
    if mask is not None and is_document_mask(mask):
        return _attend_documents(q, k, v, Documents.of(mask), scale, softcap, sinks)
    if softcap is not None or sinks is not None:
        if mask is not None and is_packed(mask):
            mask = unpack(mask, k.shape[2])
        return _attend_scored(q, k, v, mask, scale, softcap, sinks)
    if mask is not None and takes(q, k, v, mask):
        return decode_attention(q, k, v, mask, scale)
    batch, q_heads, n_new, dim = q.shape
    kv_heads = k.shape[1]
    if mask is None and n_new > 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q_heads != kv_heads)
    if q_heads == kv_heads:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    # Queries of one group share their keys: folding the group into the query axis avoids repeating K and V.
    group = q_heads // kv_heads
    folded = q.reshape(batch, kv_heads, group * n_new, dim)
    if mask is not None and n_new > 1:
        mask = mask.repeat(1, 1, group, 1)
    out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    return out.reshape(batch, q_heads, n_new, v.shape[-1])


def _attend_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    ordinary = softcap is None and sinks is None and q.shape[-1] == v.shape[-1]
    if documents.plain and ordinary and supported(q):
        return ttt_attention(q, [k], [v], documents.layout, scale)
    rows = []
    for lengths, *qkv in zip(documents.lengths(), q.split(1), k.split(1), v.split(1), strict=True):
        parts = zip(*(x.split(lengths, 2) for x in qkv), strict=True)
        done = [_attend_document(q_1, k_1, v_1, documents.window, scale, softcap, sinks) for q_1, k_1, v_1 in parts]
        rows.append(torch.cat(done, 2))
    return torch.cat(rows)


def _attend_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    length = q.shape[2]
    if window is None or length <= window:
        return attend(q, k, v, None, scale, softcap, sinks)
    tiles = []
    for start in range(0, length, _TILE):
        end, first = min(start + _TILE, length), max(0, start - window + 1)
        place = torch.arange(first, end, device=q.device)
        own = place[start - first :, None]
        seen = (place <= own) & (place > own - window)
        part = q[:, :, start:end], k[:, :, first:end], v[:, :, first:end]
        tiles.append(attend(*part, seen[None, None], scale, softcap, sinks))
    return torch.cat(tiles, 2)


def _attend_scored(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """With explicit scores: what torch's kernels do not know."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    if softcap is None:
        scores = q @ k.transpose(-1, -2) * scale
    else:
        scores = softcap * torch.tanh(q @ k.transpose(-1, -2) * (scale / softcap))
    if mask is None and q.shape[2] > 1:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
    return weights[..., : k.shape[2]] @ v


def _transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if dropout:
        raise NotImplementedError("attention dropout is not supported: put the model in eval mode")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend(query, key, value, attention_mask, scale, softcap, s_aux)
    # Contiguous, as transformers' own give it: some architectures take a view of it.
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the name known to transformers; harmless when repeated."""
    AttentionInterface.register(ATTENTION_NAME, _transformers_attention)
