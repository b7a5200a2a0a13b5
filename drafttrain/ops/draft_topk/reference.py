"""The definition: log-softmax, top-k, sum along the path."""

from __future__ import annotations

from torch import Tensor


def expand(logits: Tensor, score: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """logits [n, w, V], score [n, w] -> cumulative log-probabilities float32 [n, w, count], ids [n, w, count]."""
    values, ids = logits.topk(count, -1)
    chance = values.float() - logits.float().logsumexp(-1, keepdim=True)
    return (chance if score is None else chance + score[..., None]), ids


def select(score: Tensor, count: int) -> Tensor:
    """score [n, c] -> places of the largest int64 [n, count], best first; of equals, the first."""
    return score.sort(dim=1, descending=True, stable=True).indices[:, :count]
