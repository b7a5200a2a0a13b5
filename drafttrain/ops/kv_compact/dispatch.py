"""Choice of implementation for `kv_compact`."""

from __future__ import annotations

from torch import Tensor

from drafttrain.ops.backend import Impl, use_triton, where_it_is
from drafttrain.ops.kv_compact.reference import reference


def kv_compact(store: Tensor, lengths: Tensor, source: Tensor, first_row: int = 0, *, impl: Impl = "auto") -> None:
    """Bring accepted tokens to the front of the uncommitted ones, in all layers in one pass, in place.

    Nothing here synchronises with the device. A path is in ascending order of its slots, so that what is kept moves
    forward and all of a head's tokens can be read before the first is written.

    Args:
        store: [L, 2, rows, Hkv, S, D], keys and values of layers of one shape, contiguous; [L, 1, ...] one of the two.
        lengths: int64 [n], committed tokens of rows first_row .. first_row + n - 1.
        source: int64 [n, m], m <= 128: the token that becomes the j-th behind a row's length is the source[b, j]-th
            now; source[b, j] >= j, ascending in j.
        first_row: first of the rows.
        impl: "auto" takes the kernel on CUDA; an explicit choice never falls back.

    Raises:
        EngineError: no such `impl`, or one that cannot run here.
        ValueError: a store that is not contiguous, or too long a path.
    """
    if not store.is_contiguous() or store.dim() != 6:
        raise ValueError("a store of keys and values is one contiguous tensor of six dimensions")
    if source.shape[1] > 128:
        raise ValueError(f"a path of {source.shape[1]} tokens; it has at most 128")
    if use_triton("kv_compact", impl, store.device, store.dtype):
        from drafttrain.ops.kv_compact.triton import compact

        with where_it_is(store):
            compact(store, lengths, source, first_row)
    else:
        reference(store, lengths, source, first_row)
