"""Low-rank adapters (LoRA, arXiv 2106.09685): W + alpha / rank * B A, with W frozen.

A draft reads `weight` in its own way (packed, or through the modules of transformers), so the sum is made where the
weight is read: it holds for every family, and merging is nothing but keeping the sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from drafttrain.drafters.lora_config import LoraConfig

_BASE, _SIDE = ".parametrizations.weight.original", ".parametrizations.weight.0."


class LowRank(nn.Module):
    """The sum of a frozen weight [out, in] and an adapter that starts at zero.

    State: lora_A [rank, in], lora_B [out, rank], fp32.
    """

    def __init__(self, weight: Tensor, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        out_features, in_features = weight.shape
        self.lora_A = nn.Parameter(weight.new_empty(rank, in_features))
        self.lora_B = nn.Parameter(weight.new_zeros(out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, weight: Tensor) -> Tensor:
        """The effective weight."""
        # Autocast would round the product before it is added, and small adapters would drown.
        with nullcontext() if weight.is_meta else torch.autocast(weight.device.type, enabled=False):
            return weight + self.scale * (self.lora_B @ self.lora_A)


def add_lora(drafter: nn.Module, config: LoraConfig) -> list[str]:
    """Freeze a draft and put adapters on its linear layers; names of those.

    Raises:
        ValueError: a name in `config.modules` that no linear layer of this draft has.
    """
    found = [
        (name, module)
        for name, module in drafter.named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in config.modules
    ]
    ends = {name.rpartition(".")[2] for name, _ in found}
    missing = sorted(set(config.modules) - ends)
    if missing:
        linear = {n.rpartition(".")[2] for n, m in drafter.named_modules() if isinstance(m, nn.Linear)}
        raise ValueError(f"lora.modules: this draft has no {', '.join(missing)}; it has {', '.join(sorted(linear))}")
    drafter.requires_grad_(False)
    for _, module in found:
        adapter = LowRank(module.weight, config.rank, config.alpha / config.rank)
        parametrize.register_parametrization(module, "weight", adapter, unsafe=True)
    return [name for name, _ in found]


def adapters(drafter: nn.Module) -> Iterator[tuple[str, LowRank]]:
    """(name of the linear layer, its adapter) for every adapter of a draft."""
    for name, module in drafter.named_modules():
        if isinstance(module, LowRank):
            yield name.removesuffix(".parametrizations.weight.0"), module


def merged(drafter: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict of the draft without adapters, each added to its weight; `state` is that of `drafter`, whole."""
    scales = {name: adapter.scale for name, adapter in adapters(drafter)}
    plain = {}
    for name, tensor in state.items():
        if name.endswith(_BASE):
            owner = name.removesuffix(_BASE)
            low, high = (state[f"{owner}{_SIDE}lora_{side}"] for side in "AB")
            plain[f"{owner}.weight"] = tensor + scales[owner] * (high @ low)
        elif _SIDE not in name:
            plain[name] = tensor
    return plain
