"""Processes and devices, through accelerate. What was asked for is what is got, or an error."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import yaml
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
    asked = int(os.environ.get("WORLD_SIZE", "0")) or processes_asked(_parent_command())
    check_as_asked(asked, accelerator.num_processes, accelerator.distributed_type)
    return accelerator


def processes_asked(command: Sequence[str]) -> int:
    """Processes that an `accelerate launch` command line asks for; 1 for any other command.

    On CPUs `accelerate launch` starts a single process for most ways of asking for several, and tells it nothing:
    its command line is the only witness.
    """
    options = _launch_options(command)
    found = _option(options, "--num_processes") or _option(options, "--num-processes")
    config = _option(options, "--config_file") or _option(options, "--config-file")
    if found is None and config is not None and Path(config).is_file():
        found = str((yaml.safe_load(Path(config).read_text(encoding="utf-8")) or {}).get("num_processes", 1))
    return int(found) if found is not None and found.isdigit() else 1


def _launch_options(command: Sequence[str]) -> Sequence[str]:
    """The words of `accelerate launch` or `python -m accelerate.commands.launch` up to the script."""
    for index, word in enumerate(command):
        direct = word.endswith(("accelerate.commands.launch", "accelerate/commands/launch.py"))
        if direct or (word == "launch" and index and command[index - 1].endswith("accelerate")):
            options = command[index + 1 :]
            script = next((at for at, option in enumerate(options) if option.endswith(".py")), len(options))
            return options[:script]
    return ()


def _option(words: Sequence[str], name: str) -> str | None:
    for index, word in enumerate(words):
        if word == name and index + 1 < len(words):
            return words[index + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _parent_command() -> list[str]:
    path = Path(f"/proc/{os.getppid()}/cmdline")
    try:
        return path.read_text(encoding="utf-8", errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


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
        asked: processes that the launcher was asked for.
        got: processes that accelerate sees.
        kind: accelerate's distributed type.

    Raises:
        UserError: they differ, or several processes do not train together.
    """
    if got != asked or (asked > 1 and kind not in _PARALLEL):
        raise UserError(
            f"the launcher was asked for {asked} processes, accelerate set up {got} ({kind.value})",
            where="accelerate launch",
            remedy="start several CPU processes with --config_file recipes/accelerate/cpu.yaml (distributed_type "
            "MULTI_GPU and use_cpu: with --cpu accelerate starts one), several GPUs with ddp.yaml",
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
