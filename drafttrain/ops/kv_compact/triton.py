"""The kernel: a program moves the tokens of one row in one head of one layer, for a part of the head's width."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from drafttrain.ops.backend import next_power_of_2

_TILE = 4096
"""Entries held in registers by one program."""


@triton.jit
def _compact(
    STORE, LENGTHS, SOURCE, first_row, rows, S, moves,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    plane = (tl.program_id(1) // HEADS).to(tl.int64)  # a layer's keys or values
    head = tl.program_id(1) % HEADS
    m = tl.arange(0, BLOCK_M)
    d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    length = tl.load(LENGTHS + row)
    source = tl.load(SOURCE + row * moves + m, mask=m < moves, other=0)
    base = STORE + (((plane * rows + first_row + row) * HEADS + head) * S + length) * D
    moving = ((m < moves) & (source != m))[:, None] & (d < D)[None, :]
    tokens = tl.load(base + source[:, None] * D + d[None, :], mask=moving)
    # A thread's store may hit what another has yet to read.
    tl.debug_barrier()
    tl.store(base + m[:, None] * D + d[None, :], tokens, mask=moving)


def compact(store: Tensor, lengths: Tensor, source: Tensor, first_row: int) -> None:
    """As `dispatch.kv_compact`, whose checks it relies on."""
    layers, kinds, rows, heads, length, width = store.shape
    moves = source.shape[1]
    if moves == 0:
        return
    block_m = next_power_of_2(moves)
    block_d = min(next_power_of_2(width), max(16, _TILE // block_m))
    _compact[(len(source), layers * kinds * heads, triton.cdiv(width, block_d))](
        store, lengths, source.contiguous(), first_row, rows, length, moves,
        HEADS=heads, D=width, BLOCK_M=block_m, BLOCK_D=block_d,
    )  # fmt: skip
