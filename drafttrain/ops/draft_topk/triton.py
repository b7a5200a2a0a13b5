"""The kernels: the best of each chunk of the vocabulary, by taking the maximum out again and again; then of the chunks.

A draft's top-k is small (10 in EAGLE-2) and its vocabulary large, so the maxima of a chunk that stays in registers cost
less than reading the logits. The sum of exponentials is taken on the way.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from drafttrain.ops.backend import next_power_of_2

_CHUNK = 2048


@triton.jit
def _best_of_chunk(
    LOGITS, VALUES, IDS, MAX, SUM, V, chunks, row_stride,
    COUNT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, CHUNK)
    v = chunk * CHUNK + place
    x = tl.load(LOGITS + row * row_stride + v, mask=v < V, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    at = row * chunks + chunk
    tl.store(MAX + at, top)
    tl.store(SUM + at, tl.sum(tl.exp(x - top), 0))
    for rank in range(COUNT):
        best = tl.argmax(x, 0)
        tl.store(VALUES + at * COUNT + rank, tl.max(x, 0))
        tl.store(IDS + at * COUNT + rank, (chunk * CHUNK + best).to(tl.int64))
        x = tl.where(place == best, float("-inf"), x)


@triton.jit
def _best_of_chunks(
    VALUES, IDS, MAX, SUM, SCORE, OUT, OUT_IDS, chunks,
    COUNT: tl.constexpr, SCORED: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, CHUNKS)
    tops = tl.load(MAX + row * chunks + part, mask=part < chunks, other=float("-inf"))
    sums = tl.load(SUM + row * chunks + part, mask=part < chunks, other=0.0)
    top = tl.max(tops, 0)
    lse = top + tl.log(tl.sum(sums * tl.exp(tops - top), 0))
    base = -lse
    if SCORED:
        base += tl.load(SCORE + row)
    place = tl.arange(0, BLOCK)
    x = tl.load(VALUES + row * chunks * COUNT + place, mask=place < chunks * COUNT, other=float("-inf"))
    for rank in range(COUNT):
        # Chunks come in ascending order of ids, so of equal values the lower id is the first.
        best = tl.argmax(x, 0)
        tl.store(OUT + row * COUNT + rank, tl.max(x, 0) + base)
        tl.store(OUT_IDS + row * COUNT + rank, tl.load(IDS + row * chunks * COUNT + best))
        x = tl.where(place == best, float("-inf"), x)


@triton.jit
def _select(SCORE, OUT, candidates, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    there = place < candidates
    x = tl.load(SCORE + row * candidates + place, mask=there, other=float("-inf"))
    for rank in range(COUNT):
        # Candidates may be -inf themselves (out of a row's reach): what is there and not taken goes first.
        top = tl.max(x, 0)
        best = tl.min(tl.where(there & (x == top), place, BLOCK), 0)
        tl.store(OUT + row * COUNT + rank, best.to(tl.int64))
        there = there & (place != best)
        x = tl.where(there, x, float("-inf"))


def expand(logits: Tensor, score: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """As `dispatch.expand`, whose checks it relies on."""
    shape, vocab, device = logits.shape[:-1], logits.shape[-1], logits.device
    flat = logits.reshape(-1, vocab)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    rows, chunks = len(flat), triton.cdiv(vocab, _CHUNK)
    values = torch.empty(rows, chunks, count, dtype=torch.float32, device=device)
    ids = torch.empty(rows, chunks, count, dtype=torch.int64, device=device)
    tops, sums = (torch.empty(rows, chunks, dtype=torch.float32, device=device) for _ in range(2))
    _best_of_chunk[(rows, chunks)](
        flat, values, ids, tops, sums, vocab, chunks, flat.stride(0), COUNT=count, CHUNK=_CHUNK
    )
    out = torch.empty(rows, count, dtype=torch.float32, device=device)
    out_ids = torch.empty(rows, count, dtype=torch.int64, device=device)
    _best_of_chunks[(rows,)](
        values, ids, tops, sums, out if score is None else score.contiguous(), out, out_ids, chunks,
        COUNT=count, SCORED=score is not None,
        BLOCK=next_power_of_2(chunks * count), CHUNKS=next_power_of_2(chunks),
    )  # fmt: skip
    return out.view(*shape, count), out_ids.view(*shape, count)


def select(score: Tensor, count: int) -> Tensor:
    """As `dispatch.select`, whose checks it relies on."""
    rows, candidates = score.shape
    out = torch.empty(rows, count, dtype=torch.int64, device=score.device)
    _select[(rows,)](score.contiguous(), out, candidates, COUNT=count, BLOCK=next_power_of_2(candidates))
    return out
