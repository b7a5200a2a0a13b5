"""The map from a state to logits, with the scalings some architectures add."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """logits = softcap(scale * (x W^T + b)).

    Args:
        weight: [V, H].
        bias: [V] or None.
        softcap: c in c * tanh(logits / c) (Gemma 2), or None.
        scale: factor on the logits (Cohere, Granite).
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def __call__(self, features: Tensor) -> Tensor:
        """features [..., H] -> logits [..., V] in the features' dtype."""
        logits = F.linear(features, self.weight.to(features.dtype), self.cast_bias(features.dtype))
        return self.finish(logits)

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
