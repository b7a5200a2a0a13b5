"""The map from a state to logits, with the scalings some architectures add."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from drafttrain.ops.packed_linear import PackedWeight, linear, pack


@dataclass(frozen=True)
class Head:
    """logits = softcap(scale * (x W^T + b)).

    Args:
        weight: [V, H].
        bias: [V] or None.
        softcap: c in c * tanh(logits / c) (Gemma 2), or None.
        scale: factor on the logits (Cohere, Granite).
        packed: the weight laid out for few rows, of `prepared`.
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    packed: PackedWeight | None = None

    def __call__(self, features: Tensor) -> Tensor:
        """features [..., H] -> logits [..., V] in the features' dtype."""
        packed = self.packed
        serving = packed is not None and packed.dtype == features.dtype and not torch.is_grad_enabled()
        weight = packed if packed is not None and serving else self.weight.to(features.dtype)
        return self.finish(linear(features, weight, self.cast_bias(features.dtype)))

    def prepared(self) -> Head:
        """The same head, quick for few rows where the device allows it. For weights that no longer change."""
        return self if self.packed is not None else replace(self, packed=pack(self.weight))

    def cast_bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias in `dtype`, or None."""
        return None if self.bias is None else self.bias.to(dtype)

    def finish(self, logits: Tensor) -> Tensor:
        """Scaling and soft cap, elementwise."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits

    def rows(self, ids: Tensor) -> Head:
        """The head restricted to vocabulary entries `ids` [Vd]."""
        return Head(self.weight[ids], None if self.bias is None else self.bias[ids], self.softcap, self.scale)
