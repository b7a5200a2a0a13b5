"""The kernel: a program a row. One reading gives both log-sum-exps and the expectation under p, by rescaling what was
summed when a larger logit turns up; a second writes the gradient over the draft's logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafttrain.ops.backend import next_power_of_2

BLOCK = 4096


@triton.jit
def _soft_ce(
    DRAFT, TARGET, VALUE, TOP, weight, V, draft_row, target_row,
    DIVERGENCE: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    draft, target = DRAFT + row * draft_row, TARGET + row * target_row
    high_z = tl.full([], float("-inf"), tl.float32)
    high_t = tl.full([], float("-inf"), tl.float32)
    sum_z = tl.zeros([], tl.float32)
    sum_t = tl.zeros([], tl.float32)
    # The sum of exp(t) times what the value takes the expectation of: -z, or t - z.
    inner = tl.zeros([], tl.float32)
    top = tl.zeros([], tl.int32)
    for start in range(0, V, BLOCK):
        v = start + tl.arange(0, BLOCK)
        there = v < V
        z = tl.load(draft + v, mask=there, other=float("-inf")).to(tl.float32)
        t = tl.load(target + v, mask=there, other=float("-inf")).to(tl.float32)
        block_z = tl.max(z, 0)
        if block_z > high_z:
            sum_z *= tl.exp(high_z - block_z)
            high_z = block_z
            top = start + tl.argmax(z, 0)
        sum_z += tl.sum(tl.exp(z - high_z), 0)
        block_t = tl.max(t, 0)
        if block_t > high_t:
            faded = tl.exp(high_t - block_t)
            sum_t *= faded
            inner *= faded
            high_t = block_t
        e = tl.exp(t - high_t)
        sum_t += tl.sum(e, 0)
        gap = -tl.where(there, z, 0.0)
        if DIVERGENCE:
            gap += tl.where(there, t, 0.0)
        inner += tl.sum(e * gap, 0)
    lse_z, lse_t = high_z + tl.log(sum_z), high_t + tl.log(sum_t)
    value = inner / sum_t + lse_z
    if DIVERGENCE:
        value -= lse_t
    tl.store(VALUE + row, value)
    tl.store(TOP + row, top.to(tl.int64))
    if GRADIENT:
        for start in range(0, V, BLOCK):
            v = start + tl.arange(0, BLOCK)
            there = v < V
            z = tl.load(draft + v, mask=there, other=float("-inf")).to(tl.float32)
            t = tl.load(target + v, mask=there, other=float("-inf")).to(tl.float32)
            slope = weight * (tl.exp(z - lse_z) - tl.exp(t - lse_t))
            tl.store(draft + v, slope.to(DRAFT.dtype.element_ty), mask=there)


def soft_ce(draft: Tensor, target: Tensor, divergence: bool, weight: float, gradient: bool) -> tuple[Tensor, Tensor]:
    """As `dispatch.soft_ce`, whose checks it relies on."""
    rows, vocab = draft.shape
    value = torch.empty(rows, dtype=torch.float32, device=draft.device)
    top = torch.empty(rows, dtype=torch.int64, device=draft.device)
    if rows:
        _soft_ce[(rows,)](
            draft, target, value, top, weight, vocab, draft.stride(0), target.stride(0),
            DIVERGENCE=divergence, GRADIENT=gradient, BLOCK=min(BLOCK, next_power_of_2(vocab)), num_warps=8,
        )  # fmt: skip
    return value, top
