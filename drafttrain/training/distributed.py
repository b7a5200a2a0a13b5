"""Processes and devices, through accelerate. What was asked for is what is got, or an error."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from torch import Tensor

from drafttrain.errors import UserError

T = TypeVar("T")

_PARALLEL = {DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}
# The main rank may generate all answers while the others wait.
_PATIENCE = timedelta(days=2)


def make_accelerator() -> Accelerator:
    """Join the processes that `accelerate launch` or `torchrun` started; one process without them.

    Raises:
        UserError: the launcher asked for something else than what accelerate set up, or for ZeRO or FSDP.
    """
    _refuse_sharding()
    accelerator = Accelerator(
        mixed_precision="no",  # the recipe decides, and the trained module applies it
        cpu=not torch.cuda.is_available(),
        kwargs_handlers=[
            InitProcessGroupKwargs(timeout=_PATIENCE),
            DistributedDataParallelKwargs(broadcast_buffers=False),
        ],
    )
    check_as_asked(int(os.environ.get("WORLD_SIZE", "1")), accelerator.num_processes, accelerator.distributed_type)
    return accelerator


def _refuse_sharding() -> None:
    for variable, what in (("ACCELERATE_USE_DEEPSPEED", "DeepSpeed (ZeRO)"), ("ACCELERATE_USE_FSDP", "FSDP")):
        if os.environ.get(variable, "false").lower() in ("1", "true", "yes"):
            raise UserError(
                f"the launch config asks for {what}, which this version does not train with",
                where="accelerate launch",
                remedy="use recipes/accelerate/ddp.yaml or recipes/accelerate/cpu.yaml",
            )


def check_as_asked(asked: int, got: int, kind: DistributedType) -> None:
    """Refuse a silent fallback.

    Args:
        asked: processes that the launcher started.
        got: processes that accelerate sees.
        kind: accelerate's distributed type.

    Raises:
        UserError: they differ, or several processes do not train together.
    """
    if got != asked or (asked > 1 and kind not in _PARALLEL):
        raise UserError(
            f"the launcher started {asked} processes, accelerate set up {got} ({kind.value})",
            where="accelerate launch",
            remedy="check num_processes, use_cpu and distributed_type of the launch config",
        )


def sum_over_ranks(accelerator: Accelerator, value: Tensor) -> Tensor:
    """The sum of `value` over all ranks, on every rank, on the CPU and in float64."""
    moved = value.detach().to(accelerator.device, torch.float64)
    reduced: Tensor = accelerator.reduce(moved, reduction="sum")
    return reduced.to("cpu")


def from_main(value: T) -> T:
    """The main rank's `value`, on every rank."""
    box = [value]
    broadcast_object_list(box)
    return box[0]
