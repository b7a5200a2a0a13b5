"""Choice of implementation for `soft_ce`."""

from __future__ import annotations

from torch import Tensor

from drafttrain.ops.backend import Impl, use_triton, where_it_is
from drafttrain.ops.soft_ce import reference


def soft_ce(
    draft: Tensor,
    target: Tensor,
    *,
    divergence: bool = False,
    weight: float = 1.0,
    gradient: bool = True,
    impl: Impl = "auto",
) -> tuple[Tensor, Tensor]:
    """Cross-entropy -sum p log q, or KL(p||q), of q = softmax(draft) against p = softmax(target), row by row.

    Args:
        draft: [N, V] logits. With `gradient` they are overwritten by weight * (q - p), the gradient of
            weight * value in them.
        target: [N, V] logits.
        divergence: KL instead of cross-entropy; its gradient is the same.
        weight: factor on the gradient alone.
        gradient: write it.
        impl: "auto" takes the kernel on CUDA; an explicit choice never falls back.

    Returns:
        value [N] in fp32 at least, and the draft's most probable ids int64 [N].

    Raises:
        EngineError: no such `impl`, or one that cannot run here.
        ValueError: shapes that differ, or a draft whose rows are not contiguous.
    """
    if draft.shape != target.shape or draft.dim() != 2:
        raise ValueError(f"logits {tuple(draft.shape)} of a draft against {tuple(target.shape)} of a target")
    if draft.stride(1) != 1 or target.stride(1) != 1:
        raise ValueError("logits have contiguous rows")
    if use_triton("soft_ce", impl, draft.device, draft.dtype):
        from drafttrain.ops.soft_ce import triton

        with where_it_is(draft):
            return triton.soft_ce(draft, target, divergence, weight, gradient)
    return reference.soft_ce(draft, target, divergence, weight, gradient)
