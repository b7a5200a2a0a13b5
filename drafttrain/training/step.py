"""The forward that is trained: unroll the draft, then the objective. One module, so that DDP sees one forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from drafttrain.drafters.base import DraftBatch, Drafter
from drafttrain.losses.objective import Objective, ObjectiveOutput
from drafttrain.modeling.head import Head
from drafttrain.modeling.vocab_map import VocabMap


class TrainStep(nn.Module):
    """Loss of a micro-batch.

    Args:
        drafter: bound to the target.
        objective: weighted terms.
        target_head: frozen, on the drafter's device.
        vocab_map: on the drafter's device.
        dtype: bfloat16 for autocast over the fp32 master weights, float32 for none.
    """

    def __init__(
        self,
        drafter: Drafter,
        objective: Objective,
        target_head: Head,
        vocab_map: VocabMap,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.objective = objective
        self._target_head = target_head
        self._vocab_map = vocab_map
        self._dtype = dtype

    def forward(self, batch: DraftBatch, counts: Tensor) -> ObjectiveOutput:
        """Sum over depths of this micro-batch's loss sums over the global `counts` [K]; micro losses add up."""
        batch.features = {tap: value.to(self._dtype) for tap, value in batch.features.items()}
        # Here and not in accelerate: its precision is fixed for the life of a process.
        device = batch.tokens.device.type
        with torch.autocast(device, dtype=self._dtype, enabled=self._dtype != torch.float32):
            outputs = self.drafter.unroll(batch, len(counts))
            result = self.objective(outputs, batch, self.drafter.head, self._target_head, self._vocab_map, counts)
        if not bool(torch.as_tensor(result.total).gt(0).all()):
            # No label at some depth: parameters of that depth alone would get no gradient, and DDP would wait for it.
            result.loss = result.loss + sum(0.0 * p.reshape(-1)[0] for p in self.parameters() if p.requires_grad)
        return result


class LossOnly(nn.Module):
    """The same forward for sharding engines, whose hooks want a tensor as output; the rest is left aside."""

    def __init__(self, step: TrainStep) -> None:
        super().__init__()
        self.step = step
        self._output: ObjectiveOutput | None = None

    def forward(self, batch: DraftBatch, counts: Tensor) -> Tensor:
        """The loss of a micro-batch; `take` gives what belongs to it."""
        self._output = self.step(batch, counts)
        return self._output.loss

    def take(self) -> ObjectiveOutput:
        """The output of the last forward, once."""
        output, self._output = self._output, None
        assert output is not None
        return output
