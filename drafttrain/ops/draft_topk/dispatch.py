"""Choice of implementation for `expand` and `select`."""

from __future__ import annotations

from torch import Tensor

from drafttrain.ops.backend import Impl, use_triton, where_it_is
from drafttrain.ops.draft_topk import reference

MAX_COUNT = 64
"""Most tokens that a node is expanded into, and most places selected."""


def expand(logits: Tensor, score: Tensor | None, count: int, *, impl: Impl = "auto") -> tuple[Tensor, Tensor]:
    """The `count` likeliest tokens behind each node, and how likely the paths to them are.

    Args:
        logits: [n, w, V], finite.
        score: float32 [n, w], log-probability of the path to each node; None = 0.
        count: tokens a node, at most 64 and at most V.
        impl: "auto" takes the kernel on CUDA; an explicit choice never falls back.

    Returns:
        float32 [n, w, count], the log-probability of each path, best first; int64 [n, w, count], ids of the draft's
        vocabulary. Nothing here synchronises with the device.

    Raises:
        EngineError: no such `impl`, or one that cannot run here.
        ValueError: a count that is impossible.
    """
    _check(count, logits.shape[-1])
    if use_triton("draft_topk", impl, logits.device, logits.dtype):
        from drafttrain.ops.draft_topk import triton

        with where_it_is(logits):
            return triton.expand(logits, score, count)
    return reference.expand(logits, score, count)


def select(score: Tensor, count: int, *, impl: Impl = "auto") -> Tensor:
    """Places of the largest scores of each row: float32 [n, c <= 4096] -> int64 [n, count], best first.

    Of equal scores the earlier comes first. Raises as `expand` does.
    """
    _check(count, score.shape[-1])
    if score.shape[-1] > 4096:
        raise ValueError(f"{score.shape[-1]} candidates a row; at most 4096")
    if use_triton("draft_topk", impl, score.device, score.dtype):
        from drafttrain.ops.draft_topk import triton

        with where_it_is(score):
            return triton.select(score, count)
    return reference.select(score, count)


def _check(count: int, available: int) -> None:
    if not 1 <= count <= min(available, MAX_COUNT):
        raise ValueError(f"the best {count} of {available} were asked for; it is at most {MAX_COUNT}")
