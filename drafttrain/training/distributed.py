"""Processes and devices, through accelerate. What was asked for is what is got, or an error."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
import yaml
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DistributedType,
    InitProcessGroupKwargs,
    broadcast_object_list,
)
from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.training.launch import Launch, requested

T = TypeVar("T")

_PLAIN = {DistributedType.MULTI_CPU, DistributedType.MULTI_GPU}
_PARALLEL = {"replicated": _PLAIN, "fsdp2": {*_PLAIN, DistributedType.FSDP}, "zero": {DistributedType.DEEPSPEED}}
_DEFAULT = Launch()
# The main rank may generate all answers while the others wait.
_PATIENCE = timedelta(days=2)


def make_accelerator(launch: Launch | None = None, clip_norm: float | None = None) -> Accelerator:
    """Join the processes that `accelerate launch` or `torchrun` started; one process without them.

    Args:
        launch: what was asked for; default: read from the environment.
        clip_norm: largest gradient norm, for DeepSpeed's config.

    Raises:
        UserError: the launcher asked for something else than what accelerate set up, or its port is taken.
    """
    launch = launch or requested()
    on_cpu = not torch.cuda.is_available()
    if not dist.is_initialized():
        _require_free_port()
    if launch.kind == "zero":
        accelerator = _with_deepspeed(launch.stage, clip_norm, on_cpu)
    else:
        # accelerate hands the argument on to torch under its old name, which every rank would be warned of.
        warnings.filterwarnings("ignore", r"`broadcast_buffers` is deprecated", FutureWarning)
        handlers = [
            InitProcessGroupKwargs(timeout=_PATIENCE),
            # Gradients lie in the buckets that are sent, not beside them.
            DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True),
        ]
        # The recipe decides on the precision, and the trained module applies it.
        accelerator = Accelerator(mixed_precision="no", cpu=on_cpu, kwargs_handlers=handlers)
    if launch.kind == "fsdp2" and not dist.is_initialized():
        raise UserError(
            "FSDP2 shards over ranks, and this process was started alone",
            where="ACCELERATE_USE_FSDP",
            remedy="start it with `accelerate launch` or `torchrun`, or leave the variable out",
        )
    asked = int(os.environ.get("WORLD_SIZE", "0")) or processes_asked(_parent_command())
    check_as_asked(asked, accelerator.num_processes, accelerator.distributed_type, launch)
    return accelerator


def _with_deepspeed(stage: int, clip_norm: float | None, on_cpu: bool) -> Accelerator:
    if on_cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed.ops

        # It would be compiled when ranks start, which takes minutes, and after a kill waits for ever for a lock.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Both talk to their own developers; what a user must know, the trainer says.
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
    if "WORLD_SIZE" not in os.environ:
        # A process that nobody launched is a world of one; DeepSpeed would look for MPI.
        os.environ.update(
            RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port())
        )
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    config = {
        # The trainer says where a step ends; these only have to be there.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip_norm if stage and clip_norm is not None else 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    # What the launch config said was read and held against the recipe; accelerate would refuse it beside a config.
    os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    plugin = DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=1, zero3_init_flag=False)
    # No `cpu=True`: it would turn ZeRO into plain DDP without a word.
    group = InitProcessGroupKwargs(backend="gloo" if on_cpu else "nccl", timeout=_PATIENCE)
    accelerator = Accelerator(mixed_precision="no", deepspeed_plugin=plugin, kwargs_handlers=[group])
    # Left on, transformers would build every model in shards under stage 3, copies for measuring included.
    unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    return accelerator


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _require_free_port() -> None:
    """Refuse a taken port at once where this process would listen; `torchrun` finds its own."""
    port = os.environ.get("MASTER_PORT", "")
    listens = os.environ.get("RANK") == "0" and os.environ.get("WORLD_SIZE", "1") != "1"
    if not listens or not port.isdigit() or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except OSError as error:
            raise UserError(
                f"port {port} is in use by another process: {error.strerror}",
                where="MASTER_PORT",
                remedy="choose another port (--main_process_port, or MASTER_PORT), the same on every rank",
            ) from None


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


def check_as_asked(asked: int, got: int, kind: DistributedType, launch: Launch = _DEFAULT) -> None:
    """Refuse a silent fallback.

    Args:
        asked: processes that the launcher was asked for.
        got: processes that accelerate sees.
        kind: accelerate's distributed type.
        launch: what the launcher asked for.

    Raises:
        UserError: they differ, or several processes do not train together.
    """
    if launch.kind == "zero" and kind is not DistributedType.DEEPSPEED:
        raise UserError(
            f"{launch.name} was asked for, accelerate set up {kind.value}",
            where="accelerate launch",
            remedy="start it with --config_file recipes/accelerate/zero2.yaml, and no --cpu",
        )
    if got != asked or (asked > 1 and kind not in _PARALLEL[launch.kind]):
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
