"""RMS norm, alone and before a matrix product.

torch's norm is made of several operators on a CPU, which keep its input and the normed state in fp32; a product behind
it keeps the result as well. Here the input alone is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafttrain.ops.packed_linear import Matrix, PackedWeight, linear

# Elements of a state in one pass of a CPU's backward: its temporaries should stay in a core's cache.
_BLOCK = 2**18


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension; keeps x.

    Args:
        x: [..., H].
        weight: [H], in x's dtype.
        eps: added to the mean square.

    Returns:
        [..., H] in x's dtype; the statistics are fp32 at least.
    """
    # On a GPU torch's own kernel keeps no more than this.
    if x.device.type != "cpu" or plain():
        return _norm(x, weight, eps)
    out: Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def normed_linear(x: Tensor, norm_weight: Tensor, eps: float, weight: Matrix) -> tuple[Tensor, Tensor]:
    """n = rms_norm(x) and n W^T; keeps x.

    Args:
        x: [..., H].
        norm_weight: [H], in x's dtype.
        eps: added to the mean square.
        weight: W [out, H], in x's dtype.

    Returns:
        n [..., H] and n W^T [..., out].
    """
    if isinstance(weight, PackedWeight) or plain():
        normed = _norm(x, norm_weight, eps)
        return normed, linear(normed, weight)
    out: tuple[Tensor, Tensor] = _NormedLinear.apply(x, norm_weight, eps, weight)  # type: ignore[no-untyped-call]
    return out


def plain() -> bool:
    """Whether torch's operators serve as they are: nothing is kept, or a compiler decides what is."""
    return not torch.is_grad_enabled() or torch.compiler.is_compiling()


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return *_norm_backward(grad, x, weight, ctx.eps), None


class _NormedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, norm_weight, weight)
        ctx.eps = eps
        ctx.set_materialize_grads(False)  # most callers drop the normed state
        normed = _norm(x, norm_weight, eps)
        return normed, F.linear(normed, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_normed: Tensor | None, grad_out: Tensor | None) -> Any:
        x, norm_weight, weight = ctx.saved_tensors
        x_wanted, norm_wanted, _, weight_wanted = ctx.needs_input_grad
        grad, grad_weight = grad_normed, None
        if grad_out is not None and weight_wanted:
            grad_weight = grad_out.flatten(0, -2).t() @ _norm(x, norm_weight, ctx.eps).flatten(0, -2)
        if not (x_wanted or norm_wanted):
            return None, None, None, grad_weight
        if grad_out is not None:
            through = grad_out @ weight
            grad = through if grad is None else through.add_(grad)
        if grad is None:
            return None, None, None, grad_weight
        return *_norm_backward(grad, x, norm_weight, ctx.eps), None, grad_weight


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight, given that of the norm."""
    way: Callable[[Tensor, Tensor, Tensor, float], Sequence[Tensor]]
    way = backward_by_blocks if x.device.type == "cpu" else backward_by_kernel
    grad_x, grad_weight = way(grad, x, weight, eps)
    return grad_x, grad_weight


def backward_by_kernel(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Sequence[Tensor]:
    """By the backward of torch's norm, which is one kernel on a GPU."""
    with torch.enable_grad():
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        out = _norm(x, weight, eps)
    return torch.autograd.grad(out, (x, weight), grad)


def backward_by_blocks(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> Sequence[Tensor]:
    """A block of rows at a time, in fp32 at least. With r = 1 / rms(x), u = r x and g the gradient:
    dx = r (g w - u mean(g u w)) and dw = sum g u."""
    wide, size = torch.promote_types(x.dtype, torch.float32), x.shape[-1]
    rows = max(1, _BLOCK // size)
    grad_x, grad_weight = torch.empty_like(x, memory_format=torch.contiguous_format), weight.new_zeros(size, dtype=wide)
    w = weight.to(wide)
    parts = (part.reshape(-1, size).split(rows) for part in (x, grad, grad_x))
    for x_NH, grad_NH, out_NH in zip(*parts, strict=True):
        u, g = x_NH.to(wide, copy=True), grad_NH.to(wide, copy=True)
        r = u.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        u.mul_(r)
        by_column = g * u
        grad_weight += by_column.sum(0)
        shared = (by_column @ w).div_(size)[:, None]
        out_NH.copy_(g.mul_(w).sub_(u.mul_(shared)).mul_(r))
    return grad_x, grad_weight.to(weight.dtype)
