"""Choice of implementation for `ttt_attention`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor

from drafttrain.errors import EngineError
from drafttrain.ops.ttt_attention.flash import flash, product_dtype, supported
from drafttrain.ops.ttt_attention.layout import SegmentLayout
from drafttrain.ops.ttt_attention.reference import reference

Impl = Literal["auto", "reference", "flash"]


def ttt_attention(
    q: Tensor,
    ks: Sequence[Tensor],
    vs: Sequence[Tensor],
    segments: Tensor | SegmentLayout | None,
    scale: float,
    *,
    impl: Impl = "auto",
) -> Tensor:
    """Attention at step K of an unrolled draft (training-time test, arXiv 2503.01840).

    The query of slot t sees the step-0 keys of slots 0..t of its document and, of each later step 1..K, the
    key of slot t alone. Padding (segment -1) gives finite output and gradients, of no meaning.

    Args:
        q: [B, Hq, T, D], queries of step K.
        ks: keys of steps 0..K, each [B, Hkv, T, D]; Hkv divides Hq.
        vs: values of steps 0..K, each [B, Hkv, T, D].
        segments: int64 [B, T], a number for each document (one contiguous run) and -1 on padding; a
            `SegmentLayout` made from it once per batch; or None where each row is one document.
        scale: factor on the scores.
        impl: "auto" takes the flash kernels where they exist; an explicit choice never falls back.

    Returns:
        [B, Hq, T, D] in q's dtype (in autocast's, where it is on).

    Raises:
        EngineError: no such `impl`.
        ValueError: shapes that do not fit, or an `impl` that the device lacks.
    """
    if impl not in get_args(Impl):
        raise EngineError(f"ttt_attention has no impl {impl!r}", remedy=f"one of {', '.join(get_args(Impl))}")
    if len(ks) != len(vs) or not ks:
        raise ValueError(f"as many keys as values, of step 0 at least: got {len(ks)} and {len(vs)}")
    if q.shape[1] % ks[0].shape[1]:
        raise ValueError(f"{ks[0].shape[1]} key heads do not divide {q.shape[1]} query heads")
    dtype = product_dtype(q)
    q, ks, vs = q.to(dtype), [k.to(dtype) for k in ks], [v.to(dtype) for v in vs]

    if impl == "flash" or (impl == "auto" and supported(q)):
        return flash(q, ks, vs, SegmentLayout.of(segments) if isinstance(segments, Tensor) else segments, scale)
    if isinstance(segments, SegmentLayout):
        segments = segments.segments
    return reference(q, ks, vs, None if segments is None else segments.to(q.device), scale)
