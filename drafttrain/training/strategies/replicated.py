"""One process, or DDP: every rank holds the whole draft."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from drafttrain.drafters.base import DraftBatch
from drafttrain.losses.objective import ObjectiveOutput
from drafttrain.training.step import TrainStep
from drafttrain.training.strategies.base import Snapshot, Strategy, kept_tensors, on_cpu, step_if_finite


class Replicated(Strategy):
    """The draft's gradients are averaged over ranks; nothing is sharded.

    Args:
        accelerator: of `make_accelerator`.
        step: the forward that is trained.
        optimizer: over the draft's trainable parameters.
    """

    name = "replicated"
    sharded = False

    def __init__(self, accelerator: Accelerator, step: TrainStep, optimizer: torch.optim.Optimizer) -> None:
        self.drafter, self.optimizer = step.drafter, optimizer
        self._accelerator = accelerator
        self._ranks = accelerator.num_processes
        self._model = accelerator.prepare_model(step)

    def micro_step(self, batch: DraftBatch, counts: Tensor, last: bool) -> ObjectiveOutput:
        """See `Strategy`; ranks exchange gradients in the last micro-batch alone."""
        with nullcontext() if last else self._accelerator.no_sync(self._model):
            output: ObjectiveOutput = self._model(batch, counts)
            # DDP divides by the ranks; the counts are global already.
            self._accelerator.backward(output.loss * self._ranks)
        return output

    def update(self, rate: float, limit: float | None) -> float:
        """See `Strategy`."""
        bound = float("inf") if limit is None else limit
        norm = float(nn.utils.clip_grad_norm_(self.drafter.parameters(), bound))
        step_if_finite(self.optimizer, rate, norm)
        return norm

    def drop(self) -> None:
        """See `Strategy`."""
        self.optimizer.zero_grad(set_to_none=True)

    def snapshot(self, wanted: bool) -> Snapshot | None:
        """See `Strategy`."""
        if not wanted:
            return None
        weights = self.gather(kept_tensors(self.drafter), wanted)
        return Snapshot(weights, optimizer_tensors(self.drafter, self.optimizer))

    def load(self, snapshot: Snapshot) -> None:
        """See `Strategy`."""
        load_weights(self.drafter, snapshot.weights)
        load_moments(self.drafter, self.optimizer, snapshot.moments)

    def gather(self, tensors: Mapping[str, Tensor], wanted: bool) -> dict[str, Tensor]:
        """See `Strategy`."""
        return {name: on_cpu(tensor) for name, tensor in tensors.items()} if wanted else {}


def load_weights(drafter: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy whole weights into a draft that is whole; the frozen ones stay."""
    drafter.load_state_dict({**drafter.state_dict(), **weights})


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`<parameter name>/<key>` -> tensor on the CPU, for everything the optimiser keeps of whole parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": on_cpu(value if isinstance(value, Tensor) else torch.tensor(value))
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def load_moments(model: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in moments.items():
        name, _, entry = key.rpartition("/")
        # Adam's step counter stays where torch keeps it; moments follow their parameter.
        parameter = parameters[name]
        stays = value.dim() == 0 and not (parameter.is_cuda and optimizer.param_groups[0].get("fused"))
        optimizer.state[parameter][entry] = value.clone() if stays else value.to(parameter.device, copy=True)
