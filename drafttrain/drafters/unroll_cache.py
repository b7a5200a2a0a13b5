"""Keys and values of an unrolled draft in training."""

from __future__ import annotations

from torch import Tensor

from drafttrain.ops.ttt_attention import SegmentLayout, ttt_attention


class UnrollCache:
    """The visibility of training-time test (arXiv 2503.01840).

    The first `attend` of a layer is unroll step 0: causal within each document. In step k a slot looks at the
    step-0 keys up to its own and at its own keys of steps 1 .. k, which is exactly what a serving cache holds
    when a chain is drafted from that slot.

    Args:
        segments: int64 [B, T] document of each slot, or None for one document a row.
    """

    def __init__(self, segments: Tensor | None, n_layers: int = 1) -> None:
        self._segments = None if segments is None else SegmentLayout.of(segments)
        self._k: list[list[Tensor]] = [[] for _ in range(n_layers)]
        self._v: list[list[Tensor]] = [[] for _ in range(n_layers)]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [B, Hq, T, D], k and v [B, Hkv, T, D] -> [B, Hq, T, D]."""
        self._k[layer].append(k)
        # As a view it would keep the product that it was cut from, of which q and k have copies.
        self._v[layer].append(v.contiguous())
        return ttt_attention(q, self._k[layer], self._v[layer], self._segments, scale)
