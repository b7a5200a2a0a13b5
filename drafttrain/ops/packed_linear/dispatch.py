"""Decoding multiplies a handful of rows with every weight: its speed is that of reading the weights.

A plain `F.linear` on a CPU reads a row-major weight at a third of the memory's speed. oneDNN can lay a weight out in
blocks once and then run about twice as fast for 1 to 16 rows, with the same result; at hundreds of rows both are equal.
The reference is `F.linear` itself. GPUs and dtypes that oneDNN does not take use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

# The layout is chosen for a number of rows; measured, the one for 8 is best or near it from 1 to 64.
_ROWS = 8
# oneDNN multiplies a row alone by a kernel of its own, which sums in another order where there are over 1,024 terms and
# takes longer where weights come from memory. So there are four of it: what a token gets does not depend on its
# neighbours.
_ALONE = 4
T = TypeVar("T")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PackedWeight:
    """A weight [out, in] in oneDNN's blocked layout. It is a copy: a later change of the original is not seen."""

    blocked: Tensor
    shape: torch.Size
    dtype: torch.dtype


Matrix = Tensor | PackedWeight
"""A weight [out, in] as `linear` takes it."""


def pack(weight: Tensor) -> PackedWeight | None:
    """Lay out a weight [out, in], or None where that is not possible here."""
    if weight.device.type != "cpu" or weight.dtype not in _DTYPES or weight.dim() != 2 or not _available(weight.dtype):
        return None
    with torch.inference_mode():
        blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS)
    return PackedWeight(blocked, weight.shape, weight.dtype)


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x [..., in] W^T + b -> [..., out]. With a packed weight there is no gradient."""
    if not isinstance(weight, PackedWeight):
        return F.linear(x, weight, bias)
    alone = _is_alone(x)
    rows = torch.cat((x,) * _ALONE) if alone else x
    out: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight.blocked, bias, "none", [], "")
    return out[:1] if alone else out


def linear_add(x: Tensor, weight: PackedWeight, bias: Tensor | None, residual: Tensor) -> Tensor:
    """residual [..., out] + x [..., in] W^T + b. The sum is rounded once. There is no gradient."""
    alone = _is_alone(x)
    rows, added = (torch.cat((x,) * _ALONE), torch.cat((residual,) * _ALONE)) if alone else (x, residual)
    out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, added, weight.blocked, bias, "add")
    return out[:1] if alone else out


def _is_alone(x: Tensor) -> bool:
    return x.dim() > 1 and x.numel() == x.shape[-1]


def pack_tree(weights: T) -> T:
    """A copy of nested tuples of tensors (named ones too) with every matrix packed that can be."""
    if isinstance(weights, Tensor):
        return pack(weights) or weights if weights.dim() == 2 else weights  # type: ignore[return-value]
    if isinstance(weights, tuple):
        packed = [pack_tree(item) for item in weights]
        return type(weights)(*packed) if hasattr(weights, "_fields") else type(weights)(packed)
    return weights


@cache
def _available(dtype: torch.dtype) -> bool:
    """oneDNN's entry points are not part of torch's public interface: they are tried before they are relied on."""
    if not torch.backends.mkldnn.is_available():
        return False
    weight, x = torch.eye(16, dtype=dtype), torch.ones(2, 16, dtype=dtype)
    try:
        with torch.inference_mode():
            blocked = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
            out = torch.ops.mkldnn._linear_pointwise(x, blocked, None, "none", [], "")
            twice = torch.ops.mkldnn._linear_pointwise.binary(x, out, blocked, None, "add")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return bool(torch.equal(out, x) and torch.equal(twice, x + x))
