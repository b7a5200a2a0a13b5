"""The gated product of an MLP and the matrix product behind it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafttrain.ops.packed_linear import Matrix, PackedWeight, linear
from drafttrain.ops.recompute.norm import plain


def gated_linear(gate_up: Tensor, weight: Matrix, *, checkpointed: bool = False) -> Tensor:
    """(silu(gate) * up) W^T; keeps gate and up, and neither of the two products.

    Args:
        gate_up: [..., 2 I], the gate before what it gates.
        weight: W [out, I], in the same dtype.
        checkpointed: it stands last in what gradient checkpointing computes again. Then the products are kept after
            all, for as long as that takes: torch stops at the last tensor that is kept, which saves the product with W.

    Returns:
        [..., out].
    """
    if isinstance(weight, PackedWeight) or checkpointed or plain():
        gate, up = gate_up.chunk(2, dim=-1)
        return linear(F.silu(gate) * up, weight)
    out: Tensor = _GatedLinear.apply(gate_up, weight)  # type: ignore[no-untyped-call]
    return out


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.linear(F.silu(gate).mul_(up), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> Any:
        gate_up, weight = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        opened = F.silu(gate)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = grad_out.flatten(0, -2).t() @ (opened * up).flatten(0, -2)
        grad = grad_out @ weight
        # Both halves are written where they belong: nothing is put together afterwards.
        grad_gate_up = torch.empty_like(gate_up)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        torch.mul(grad, opened, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grad.mul_(up), gate, grad_input=grad_gate)
        return grad_gate_up, grad_weight
