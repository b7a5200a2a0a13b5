"""From what a launch asks for to a strategy."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from drafttrain.training.launch import Launch
from drafttrain.training.step import TrainStep
from drafttrain.training.strategies.base import Strategy
from drafttrain.training.strategies.replicated import Replicated


def make_strategy(
    launch: Launch | None, accelerator: Accelerator, step: TrainStep, optimizer: torch.optim.AdamW
) -> Strategy:
    """The strategy of a launch; none is a single process or DDP."""
    if launch is not None and launch.kind == "zero":
        from drafttrain.training.strategies.zero import Zero

        return Zero(accelerator, step, optimizer, launch.stage)
    if launch is not None and launch.kind == "fsdp2":
        from drafttrain.training.strategies.fsdp import FullyShardedData

        return FullyShardedData(accelerator, step, optimizer)
    return Replicated(accelerator, step, optimizer)
