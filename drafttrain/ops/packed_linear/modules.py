"""Packed weights in the modules of a model, whatever its architecture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.ops.packed_linear.dispatch import PackedWeight, linear, linear_add, pack

# Children of one module that read the same input: one product for all of them costs less than one each.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def pack_linears(module: nn.Module) -> None:
    """Let every `nn.Linear` below `module` use a packed copy of its weight when no gradient is wanted.

    The copies do not follow later changes of the weights: call it again after one.
    """
    for group in _groups(module):
        packed = pack(torch.cat([child.weight.detach() for child in group]) if len(group) > 1 else group[0].weight)
        if packed is None:
            continue
        joint = PackedProduct(group, packed)
        for index, child in enumerate(group):
            child.forward = _PackedForward(child, joint, index)  # type: ignore[assignment,method-assign]


def is_packed(module: nn.Module) -> bool:
    """Whether `pack_linears` has been at this module itself."""
    return isinstance(module.forward, _PackedForward)


def packed_product(module: nn.Module, modules: int = 1) -> PackedProduct | None:
    """The product that `pack_linears` made for this module, if it is one of `modules` in it, the first."""
    forward = module.forward
    if not isinstance(forward, _PackedForward) or forward.index or forward.joint.members != modules:
        return None
    return forward.joint


def _groups(module: nn.Module) -> Iterator[list[nn.Linear]]:
    for parent in module.modules():
        left = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        for names in _TOGETHER:
            group = [left[name] for name in names if name in left]
            if len(group) == len(names) and len({_kind(child) for child in group}) == 1:
                yield group
                left = {name: child for name, child in left.items() if name not in names}
        yield from ([child] for child in left.values())
    if type(module) is nn.Linear:
        yield [module]


def _kind(module: nn.Linear) -> tuple[int, torch.dtype, torch.device, bool]:
    weight = module.weight
    return module.in_features, weight.dtype, weight.device, module.bias is not None


class PackedProduct:
    """The products of modules that read one input, made when the first is asked for."""

    def __init__(self, modules: Sequence[nn.Linear], packed: PackedWeight) -> None:
        self.packed = packed
        biases = [module.bias.detach() for module in modules if module.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self._sizes = [module.out_features for module in modules]
        self._last: tuple[Tensor, Sequence[Tensor]] | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and inputs."""
        return self.packed.dtype

    @property
    def members(self) -> int:
        """How many modules."""
        return len(self._sizes)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., in] -> the outputs of all modules behind each other [..., sum of out], with `residual` added before
        they are rounded."""
        if residual is None:
            return linear(x, self.packed, self.bias)
        return linear_add(x, self.packed, self.bias, residual)

    def part(self, x: Tensor, index: int) -> Tensor:
        """The output [..., out] of one of the modules."""
        if len(self._sizes) == 1:
            return self(x)
        # One read and one write of the attribute: another thread's input is never taken for this one.
        last = self._last
        if last is None or last[0] is not x:
            last = x, self(x).split(self._sizes, -1)
        self._last = last if index < len(self._sizes) - 1 else None
        return last[1][index]


class _PackedForward:
    """In place of `nn.Linear.forward`."""

    def __init__(self, module: nn.Linear, joint: PackedProduct, index: int) -> None:
        self.module, self.joint, self.index = module, joint, index

    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        if x.dtype != self.joint.packed.dtype or torch.is_grad_enabled() or x.device.type != "cpu":
            return F.linear(x, module.weight, module.bias)
        return self.joint.part(x, self.index)
