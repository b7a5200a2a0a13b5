"""Choice of implementation for `tree_attention`."""

from __future__ import annotations

from torch import Tensor

from drafttrain.ops.backend import Impl, use_triton, where_it_is
from drafttrain.ops.tree_attention.packed import is_packed
from drafttrain.ops.tree_attention.reference import reference


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packed: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    impl: Impl = "auto",
    splits: int | None = None,
) -> Tensor:
    """Grouped-query attention over a cached text and a tree of up to 64 nodes behind it.

    One definition serves decoding (no tail), chains, trees, and the levels of a tree that a draft grows.

    Args:
        q: [B, Hq, T, D].
        k: [B, Hkv, S, D], any strides but a contiguous last axis; Hkv divides Hq. Slots behind the tail are never
            seen and may hold anything finite.
        v: [B, Hkv, S, Dv], likewise; narrower than keys in latent attention.
        packed: int64 [B, 1, T, 3 or 4], from `pack`. Every query sees something.
        scale: factor on the scores.
        softcap: c in c * tanh(scores / c), or None.
        impl: "auto" takes the kernel on CUDA; an explicit choice never falls back.
        splits: parts in which the text is read side by side (split-KV, as in flash decoding); None = enough to fill
            the device. The reference ignores it.

    Returns:
        [B, Hq, T, Dv] in q's dtype. Nothing here synchronises with the device.

    Raises:
        EngineError: no such `impl`, or one that cannot run here.
        ValueError: shapes that do not fit.
    """
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{k.shape[1]} key heads do not divide {q.shape[1]} query heads")
    if q.shape[-1] != k.shape[-1] or k.shape[:3] != v.shape[:3]:
        raise ValueError(f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not fit")
    if not is_packed(packed) or packed.shape[:3] != (q.shape[0], 1, q.shape[2]) or packed.shape[3] not in (3, 4):
        raise ValueError(f"queries {tuple(q.shape)} need a packed mask, got {packed.dtype} {tuple(packed.shape)}")
    if use_triton("tree_attention", impl, q.device, q.dtype):
        from drafttrain.ops.tree_attention.triton import attend

        with where_it_is(q):
            return attend(q, k, v, packed, scale, softcap, splits)
    return reference(q, k, v, packed, scale, softcap)
