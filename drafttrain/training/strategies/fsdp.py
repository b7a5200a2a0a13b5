"""FSDP2: torch's `fully_shard` (arXiv 2304.11277), weights, gradients and optimiser state in shards.

Drafts read weights without calling the modules that own them, so the trained forward is one unit: the whole draft is
gathered for a micro-batch, as under ZeRO-3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from drafttrain.drafters.base import DraftBatch
from drafttrain.losses.objective import ObjectiveOutput
from drafttrain.training.step import LossOnly, TrainStep
from drafttrain.training.strategies.base import Snapshot, Strategy, kept_tensors, on_cpu, step_if_finite, trainable


class FullyShardedData(Strategy):
    """Every rank keeps a slice of each parameter along its first dimension.

    Args:
        accelerator: gives the ranks.
        step: the forward that is trained.
        optimizer: over the draft's trainable parameters; made over their shards anew.
    """

    name = "FSDP2"
    sharded = True

    def __init__(self, accelerator: Accelerator, step: TrainStep, optimizer: torch.optim.AdamW) -> None:
        self.drafter = step.drafter
        self._loss: Any = LossOnly(step)
        self._ranks = accelerator.num_processes
        groups = [
            ([names for names, p in trainable(self.drafter) if any(p is q for q in group["params"])], group)
            for group in optimizer.param_groups
        ]
        mesh = init_device_mesh(accelerator.device.type, (self._ranks,))
        fully_shard(self._loss, mesh=mesh)
        own = dict(trainable(self.drafter))
        self.optimizer = torch.optim.AdamW(
            [{**_options(group), "params": [own[name] for name in names]} for names, group in groups]
        )

    def micro_step(self, batch: DraftBatch, counts: Tensor, last: bool) -> ObjectiveOutput:
        """See `Strategy`; ranks exchange gradients in the last micro-batch alone."""
        self._loss.set_requires_gradient_sync(last)
        loss = self._loss(batch, counts)
        # FSDP divides by the ranks; the counts are global already.
        (loss * self._ranks).backward()
        output: ObjectiveOutput = self._loss.take()
        return output

    def update(self, rate: float, limit: float | None) -> float:
        """See `Strategy`."""
        self._loss.reshard()
        bound = float("inf") if limit is None else limit
        total = nn.utils.clip_grad_norm_([p for _, p in trainable(self.drafter)], bound, foreach=False)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        step_if_finite(self.optimizer, rate, norm)
        return norm

    def drop(self) -> None:
        """See `Strategy`."""
        self._loss.reshard()
        self.optimizer.zero_grad(set_to_none=True)

    def snapshot(self, wanted: bool) -> Snapshot | None:
        """See `Strategy`."""
        weights = self.gather(kept_tensors(self.drafter), wanted)
        moments = self.gather(
            {
                f"{name}/{key}": value
                for name, parameter in trainable(self.drafter)
                for key, value in self.optimizer.state.get(parameter, {}).items()
            },
            wanted,
        )
        return Snapshot(weights, moments) if wanted else None

    @torch.no_grad()
    def load(self, snapshot: Snapshot) -> None:
        """See `Strategy`."""
        own = kept_tensors(self.drafter)
        for name, value in snapshot.weights.items():
            own[name].copy_(_like(value, own[name]))
        self.optimizer.state.clear()
        parameters = dict(trainable(self.drafter))
        for key, value in snapshot.moments.items():
            name, _, entry = key.rpartition("/")
            parameter = parameters[name]
            self.optimizer.state[parameter][entry] = value.clone() if value.dim() == 0 else _like(value, parameter)

    def gather(self, tensors: Mapping[str, Tensor], wanted: bool) -> dict[str, Tensor]:
        """See `Strategy`. One tensor at a time is whole on a device."""
        whole = {}
        for name, tensor in tensors.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if wanted:
                whole[name] = on_cpu(full)
        return whole


def _options(group: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name != "params"}
    # torch's fused and multi-tensor kernels do not take shards on every device.
    return {**options, "fused": None, "foreach": False}


def _like(value: Tensor, shard: Tensor) -> Tensor:
    if not isinstance(shard, DTensor):
        return value.to(shard.device)
    return distribute_tensor(value.to(shard.device), shard.device_mesh, shard.placements)
