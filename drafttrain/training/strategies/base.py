"""What differs between ways of training over ranks: where weights, gradients and optimiser state live."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafttrain.drafters.base import DraftBatch, Drafter
from drafttrain.drafters.lora import adapters, merged
from drafttrain.losses.objective import ObjectiveOutput


@dataclass(frozen=True)
class Snapshot:
    """What a checkpoint keeps of a draft, whole and independent of how many ranks it was trained on.

    Attributes:
        weights: trainable parameters and buffers by their names in the draft's state dict, fp32, on the CPU.
        moments: `<parameter>/<key>` -> what the optimiser keeps, on the CPU; empty before the first step.
    """

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


@dataclass(frozen=True)
class Whole:
    """A draft to be measured or saved.

    Attributes:
        drafter: plain, adapters merged into it.
        adapter: tensors of the adapters by their names in the draft that is trained, on the CPU; empty without them.
    """

    drafter: Drafter
    adapter: dict[str, Tensor]


class Strategy(ABC):
    """Trains a draft over ranks. Every method must be called by every rank, in the same order.

    Attributes:
        name: for messages.
        sharded: whether the draft's weights are shards between steps.
        drafter: the draft; between steps its parameters may be shards.
        optimizer: AdamW over the trainable parameters.
    """

    name: str
    sharded: bool
    drafter: Drafter
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def micro_step(self, batch: DraftBatch, counts: Tensor, last: bool) -> ObjectiveOutput:
        """Forward and backward of a micro-batch; gradients add up over micro-batches and ranks.

        Args:
            batch: this rank's.
            counts: [K] labels of the whole step over all ranks, which the loss is divided by.
            last: of this optimiser step.
        """

    @abstractmethod
    def update(self, rate: float, limit: float | None) -> float:
        """Clip the global norm to `limit` and step at learning rate `rate`, then drop the gradients.

        Returns:
            the global norm before clipping; when it is not finite, nothing was changed but the gradients dropped.
        """

    @abstractmethod
    def drop(self) -> None:
        """Forget the gradients of this step, after its last micro-batch, in place of `update`."""

    @abstractmethod
    def snapshot(self, wanted: bool) -> Snapshot | None:
        """The whole state, on ranks where it is `wanted`."""

    @abstractmethod
    def load(self, snapshot: Snapshot) -> None:
        """Put a whole state back; every rank gives the same one."""

    @abstractmethod
    def gather(self, tensors: Mapping[str, Tensor], wanted: bool) -> dict[str, Tensor]:
        """Whole copies of the draft's tensors on the CPU, on ranks where they are `wanted`."""

    def whole(self, wanted: bool) -> Whole | None:
        """The draft as it stands, to be read, where it is `wanted`.

        It is the one in training where that is whole and has no adapters, else a copy.
        """
        drafter = self.drafter
        named = dict(adapters(drafter))
        if not self.sharded and not named:
            return Whole(drafter, {}) if wanted else None
        state = self.gather(drafter.state_dict(keep_vars=True), wanted)
        if not wanted:
            return None
        device = next(drafter.parameters()).device
        copy = type(drafter).from_saved(drafter.config, drafter.saved_arch(), drafter.vocab_map, device)
        copy.load_state_dict(merged(drafter, state))
        copy.bound = drafter.bound
        return Whole(copy, {name: state[name] for name, _ in trainable(drafter)} if named else {})


def kept_tensors(drafter: nn.Module) -> dict[str, Tensor]:
    """Trainable parameters and buffers under the names of the state dict; frozen weights are left out."""
    state: Mapping[str, Tensor] = drafter.state_dict(keep_vars=True)
    return {
        name: tensor for name, tensor in state.items() if not isinstance(tensor, nn.Parameter) or tensor.requires_grad
    }


def trainable(drafter: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters, each once."""
    return ((name, parameter) for name, parameter in drafter.named_parameters() if parameter.requires_grad)


def step_if_finite(optimizer: torch.optim.Optimizer, rate: float, norm: float) -> None:
    """Step at learning rate `rate` unless the gradient's norm is NaN or infinite; drop the gradients in any case."""
    if math.isfinite(norm):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def bucket_elements(trained: int) -> int:
    """Gradients that are sent at a time, of `trained` ones; where buckets are allocated, larger parameters go alone."""
    # DeepSpeed wants an even number.
    return min(trained + trained % 2, 50_000_000)


def on_cpu(tensor: Tensor) -> Tensor:
    """A contiguous copy: safetensors refuses tensors that share memory."""
    return tensor.detach().to("cpu", copy=True).contiguous()
