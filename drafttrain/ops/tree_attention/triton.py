"""The kernels: one block of queries of one key head against one part of the text, then a merge of the parts.

Queries of a group share their keys, so a block holds the G * T queries of a key head, head-major. The text is read in
blocks without a mask; the tail follows in words of 32 slots, whose bits mask it with 32-bit arithmetic only (64-bit
tiles spill).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafttrain.ops.backend import interpreted, next_power_of_2

_WORD = 32
_MAX_SPLITS = 32
# Tokens of text that are worth a part of their own.
_PART = 256


@triton.jit
def _popcount(x):  # uint32
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _step(q, k, v, seen, best, total, acc, scale, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """One block of keys: q [M, D], k [D, N], v [N, Dv], seen [M, N] -> the running maximum, sum and output."""
    scores = tl.dot(q, k, input_precision=PRECISION) * scale
    if SOFTCAP:
        scores = softcap * _tanh(scores / softcap)
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    # Where nothing has been seen yet, any finite reference will do.
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp(scores - base[:, None])
    faded = tl.exp(best - base)
    total = total * faded + tl.sum(weights, 1)
    acc = acc * faded[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return higher, total, acc


@triton.jit
def _attend(
    Q, K, V, PACKED, OUT, PART, LSE,
    scale, softcap, T, S,
    q_row, q_head, q_token, k_row, k_head, k_token, v_row, v_head, v_token, o_row, o_head, o_token,
    HKV: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, FIELDS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, WORD: tl.constexpr,
    SOFTCAP: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // HKV).to(tl.int64)
    head = tl.program_id(0) % HKV
    split = tl.program_id(2)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < G * T
    token = m % T
    q_heads = head * G + m // T
    d = tl.arange(0, BLOCK_D)
    inside = d < D
    e = tl.arange(0, BLOCK_V)
    of_value = e < DV

    fields = PACKED + row * T * FIELDS
    bits = tl.load(fields + token * FIELDS, mask=live, other=0)
    prefix = tl.load(fields + 1).to(tl.int32)
    tail = tl.load(fields + 2).to(tl.int32)
    low = (bits & 0xFFFFFFFF).to(tl.uint32)
    high = ((bits >> 32) & 0xFFFFFFFF).to(tl.uint32)
    begin = 0
    position = prefix
    window = 0
    if FIELDS == 4:
        window = tl.load(fields + 3).to(tl.int32)
        # The first query's token is the earliest: what its window hides is hidden from all.
        begin = tl.maximum(prefix - window, 0)
        position = prefix - 1 + _popcount(low) + _popcount(high)

    q = tl.load(
        Q + row * q_row + q_heads[:, None] * q_head + token[:, None] * q_token + d[None, :],
        mask=live[:, None] & inside[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    per = tl.cdiv(tl.cdiv(prefix - begin, SPLITS), BLOCK_N) * BLOCK_N
    first = begin + split * per
    last = tl.minimum(first + per, prefix)
    keys = K + row * k_row + head * k_head
    values = V + row * v_row + head * v_head
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        there = n < last
        k = tl.load(keys + n[None, :] * k_token + d[:, None], mask=there[None, :] & inside[:, None], other=0.0)
        v = tl.load(values + n[:, None] * v_token + e[None, :], mask=there[:, None] & of_value[None, :], other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        seen = there[None, :]
        if FIELDS == 4:
            seen = seen & (n[None, :] > (position - window)[:, None])
        best, total, acc = _step(q, k, v, seen, best, total, acc, scale, softcap, SOFTCAP, PRECISION)

    if split == SPLITS - 1:
        slot = tl.arange(0, WORD)
        for word in range(0, tl.cdiv(tail, WORD)):
            n = prefix + word * WORD + slot
            there = (word * WORD + slot < tail) & (n < S)
            k = tl.load(keys + n[None, :] * k_token + d[:, None], mask=there[None, :] & inside[:, None], other=0.0)
            v = tl.load(values + n[:, None] * v_token + e[None, :], mask=there[:, None] & of_value[None, :], other=0.0)
            if UPCAST:
                k = k.to(tl.float32)
                v = v.to(tl.float32)
            own = tl.where(word == 0, low, high)
            shifted = own[:, None] >> slot[None, :].to(tl.uint32)
            seen = ((shifted & 1) == 1) & there[None, :]
            if FIELDS == 4:
                behind = _popcount(shifted) + tl.where(word == 0, _popcount(high), 0)[:, None]
                seen = seen & (behind <= window)
            best, total, acc = _step(q, k, v, seen, best, total, acc, scale, softcap, SOFTCAP, PRECISION)

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if SPLITS == 1:
        place = OUT + row * o_row + q_heads[:, None] * o_head + token[:, None] * o_token + e[None, :]
        tl.store(place, out.to(OUT.dtype.element_ty), mask=live[:, None] & of_value[None, :])
    else:
        index = ((row * HKV * G + q_heads) * T + token) * SPLITS + split
        tl.store(PART + index[:, None] * DV + e[None, :], out, mask=live[:, None] & of_value[None, :])
        tl.store(LSE + index, best + tl.log(tl.where(total == 0.0, 1.0, total)), mask=live)


@triton.jit
def _merge(
    PART, LSE, OUT, T, o_row, o_head, o_token,
    HQ: tl.constexpr, DV: tl.constexpr, SPLITS: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64)
    row, head, token = index // (HQ * T), index // T % HQ, index % T
    split = tl.arange(0, SPLITS)
    e = tl.arange(0, BLOCK_V)
    lse = tl.load(LSE + index * SPLITS + split)
    weights = tl.exp(lse - tl.max(lse, 0))
    weights = weights / tl.sum(weights, 0)
    place = PART + (index * SPLITS + split)[:, None] * DV + e[None, :]
    parts = tl.load(place, mask=(e < DV)[None, :], other=0.0)
    out = tl.sum(parts * weights[:, None], 0)
    tl.store(OUT + row * o_row + head * o_head + token * o_token + e, out.to(OUT.dtype.element_ty), mask=e < DV)


def config(group_queries: int, key_width: int, value_width: int) -> dict[str, int]:
    """Blocks, warps and stages for G * T queries of a key head; none of them spills on sm_80, sm_90 or sm_100."""
    # Heads beyond 128 (latent attention, Gemma) have one tile: larger ones fill the registers of sm_100 and the shared
    # memory of sm_89, smaller ones spill on sm_90.
    width = max(key_width, value_width)
    least, most = (16, 64) if width <= 128 else (32, 32)
    block_m = min(most, max(least, next_power_of_2(group_queries)))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": 64 if block_m < most else 32,
        "BLOCK_D": max(16, next_power_of_2(key_width)),
        "BLOCK_V": max(16, next_power_of_2(value_width)),
        # A wide head's tile of 64 queries is shared by twice the threads: on sm_100 four warps spill.
        "num_warps": 8 if block_m == 64 and width > 64 else 4,
        "num_stages": 2,
    }


def choose_splits(programs: int, visible: int, device: torch.device) -> int:
    """Parts of the text: a power of two, enough to give every multiprocessor work twice over."""
    if device.type != "cuda":
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count // max(1, programs)
    useful = max(1, visible // _PART)
    splits = 1
    while 2 * splits <= min(wanted, useful, _MAX_SPLITS):
        splits *= 2
    return splits


def attend(
    q: Tensor, k: Tensor, v: Tensor, packed: Tensor, scale: float, softcap: float | None, splits: int | None
) -> Tensor:
    """As `dispatch.tree_attention`, whose checks it relies on."""
    rows, q_heads, tokens, width = q.shape
    kv_heads, visible, value_width = v.shape[1:]
    group = q_heads // kv_heads
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    packed = packed.contiguous()
    sizes = config(group * tokens, width, value_width)
    blocks = triton.cdiv(group * tokens, sizes["BLOCK_M"])
    if splits is None:
        splits = choose_splits(rows * kv_heads * blocks, visible, q.device)
    # Token-major, as the next projection reads it.
    out = torch.empty(rows, tokens, q_heads, value_width, dtype=q.dtype, device=q.device).transpose(1, 2)
    part, lse = out, out
    if splits > 1:
        part = torch.empty(rows * q_heads * tokens * splits, value_width, dtype=torch.float32, device=q.device)
        lse = torch.empty(rows * q_heads * tokens * splits, dtype=torch.float32, device=q.device)
    _attend[(rows * kv_heads, blocks, splits)](
        q, k, v, packed, out, part, lse,
        scale, 0.0 if softcap is None else softcap, tokens, visible,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3],
        HKV=kv_heads, G=group, D=width, DV=value_width, FIELDS=packed.shape[-1], SPLITS=splits, WORD=_WORD,
        SOFTCAP=softcap is not None,
        # The interpreter computes wrongly in bf16.
        UPCAST=interpreted() or q.dtype == torch.float32,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **sizes,
    )  # fmt: skip
    if splits > 1:
        _merge[(rows * q_heads * tokens,)](
            part, lse, out, tokens, *out.stride()[:3],
            HQ=q_heads, DV=value_width, SPLITS=splits, BLOCK_V=sizes["BLOCK_V"],
        )  # fmt: skip
    return out
