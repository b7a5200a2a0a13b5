"""DeepSpeed's ZeRO, stages 0 to 3 (arXiv 1910.02054), over the same fp32 master weights as every other strategy.

Precision is the trained module's own autocast, so DeepSpeed always sees fp32: bf16 means the same on every backend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from drafttrain.drafters.base import DraftBatch
from drafttrain.losses.objective import ObjectiveOutput
from drafttrain.training.step import LossOnly, TrainStep
from drafttrain.training.strategies.base import (
    Snapshot,
    Strategy,
    bucket_elements,
    kept_tensors,
    on_cpu,
    trainable,
)
from drafttrain.training.strategies.replicated import load_moments, load_weights, optimizer_tensors


class Zero(Strategy):
    """Optimiser state in shards from stage 1, gradients from stage 2, weights from stage 3.

    Args:
        accelerator: with a DeepSpeed plugin of `stage`.
        step: the forward that is trained.
        optimizer: over the draft's trainable parameters; DeepSpeed takes it over.
        stage: 0 to 3.
    """

    def __init__(self, accelerator: Accelerator, step: TrainStep, optimizer: torch.optim.Optimizer, stage: int) -> None:
        self.name, self.stage, self.sharded = f"ZeRO-{stage}", stage, stage == 3
        self.drafter, self.optimizer = step.drafter, optimizer
        self._rank, self._ranks = accelerator.process_index, accelerator.num_processes
        self._loss = LossOnly(step)
        _fit_buckets(accelerator, sum(p.numel() for _, p in trainable(self.drafter)))
        self._engine: Any = accelerator.prepare(self._loss, optimizer)[0]
        if stage == 3:
            self._gather_in_forward()

    def _gather_in_forward(self) -> None:
        from deepspeed.runtime.zero import register_external_parameter

        # Drafts read weights without calling the modules that own them, so no hook of those would gather them.
        for parameter in self.drafter.parameters():
            register_external_parameter(self._loss, parameter)

    def micro_step(self, batch: DraftBatch, counts: Tensor, last: bool) -> ObjectiveOutput:
        """See `Strategy`."""
        self._engine.set_gradient_accumulation_boundary(last)
        loss = self._engine(batch, counts)
        # DeepSpeed divides by the ranks; the counts are global already.
        self._engine.backward(loss * self._ranks)
        return self._loss.take()

    def update(self, rate: float, limit: float | None) -> float:
        """See `Strategy`. From stage 1, `limit` stands in DeepSpeed's own config."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.stage:
            self._engine.step()
            if self._engine.optimizer.overflow:
                return math.inf
            return float(self._engine.get_global_grad_norm())
        bound = float("inf") if limit is None else limit
        norm = float(nn.utils.clip_grad_norm_(self.drafter.parameters(), bound))
        if math.isfinite(norm):
            self._engine.step()
        else:
            self._engine.zero_grad()
        return norm

    def drop(self) -> None:
        """See `Strategy`."""
        if not self.stage:
            self._engine.zero_grad()
            return
        # DeepSpeed clears its shards and buckets of gradients where it finds one that is not finite, and only there.
        for shards in self._engine.optimizer.averaged_gradients.values():
            for shard in shards or ():
                if shard is not None:
                    shard.fill_(math.nan)
        self._engine.step()

    def snapshot(self, wanted: bool) -> Snapshot | None:
        """See `Strategy`."""
        weights = self.gather(kept_tensors(self.drafter), wanted)
        moments = self._moments(wanted)
        return Snapshot(weights, moments) if wanted else None

    def gather(self, tensors: Mapping[str, Tensor], wanted: bool) -> dict[str, Tensor]:
        """See `Strategy`. One tensor at a time is whole on a device."""
        whole = {}
        for name, tensor in tensors.items():
            with gathered([tensor]):
                if wanted:
                    whole[name] = on_cpu(tensor)
        return whole

    def _link_moments(self) -> None:
        """Let DeepSpeed find each parameter's slice of the moments: by itself it does so for the first group alone."""
        if self.stage < 3:
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _moments(self, wanted: bool) -> dict[str, Tensor]:
        if not self.stage:
            return optimizer_tensors(self.drafter, self.optimizer) if wanted else {}
        from deepspeed.utils import safe_get_full_optimizer_state

        moments: dict[str, Tensor] = {}
        step = next((entries["step"] for entries in self.optimizer.state.values()), None)
        if step is None or not float(step):
            return moments
        self._link_moments()
        for name, parameter in trainable(self.drafter):
            for key in ("exp_avg", "exp_avg_sq"):
                value = safe_get_full_optimizer_state(parameter, key)
                if wanted:
                    moments[f"{name}/{key}"] = on_cpu(value).view(_whole_shape(parameter))
            if wanted:
                moments[f"{name}/step"] = on_cpu(step)
        return moments

    def load(self, snapshot: Snapshot) -> None:
        """See `Strategy`."""
        if self.stage == 3:
            own = kept_tensors(self.drafter)
            for name, value in snapshot.weights.items():
                with gathered([own[name]], write=True), torch.no_grad():
                    own[name].copy_(value)
        else:
            load_weights(self.drafter, snapshot.weights)
        if not self.stage:
            load_moments(self.drafter, self.optimizer, snapshot.moments)
            return
        self._engine.optimizer.refresh_fp32_params()
        if snapshot.moments:
            self._load_moments(snapshot.moments)
        else:
            for entries in self.optimizer.state.values():
                for value in entries.values():
                    value.zero_()

    def _load_moments(self, moments: dict[str, Tensor]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        step = next(value for key, value in moments.items() if key.endswith("/step"))
        engine = self._engine.optimizer
        shards = engine.fp32_partitioned_groups_flat if self.stage == 3 else engine.single_partition_of_fp32_groups
        for shard in shards:
            entries = self.optimizer.state[shard]
            for key in ("exp_avg", "exp_avg_sq"):
                entries.setdefault(key, torch.zeros_like(shard))
            entries["step"] = step.clone().to(shard.device if shard.is_cuda else "cpu")
        self._link_moments()
        for name, parameter in trainable(self.drafter):
            for key in ("exp_avg", "exp_avg_sq"):
                value = moments[f"{name}/{key}"].to(parameter.device)
                if self.stage == 3:
                    safe_set_local_optimizer_state(parameter, self._own_part(value, parameter), key)
                else:
                    safe_set_full_optimizer_state(parameter, value, key)

    def _own_part(self, value: Tensor, parameter: Any) -> Tensor:
        """This rank's slice of a whole tensor; the last one is padded."""
        size = parameter.ds_tensor.numel()
        flat = F.pad(value.flatten(), (0, size * self._ranks - value.numel()))
        return flat.narrow(0, size * self._rank, size)


def _fit_buckets(accelerator: Accelerator, elements: int) -> None:
    """Buckets of no more than a draft has gradients: DeepSpeed allocates them whole, 2 GB each by default."""
    config = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    config["reduce_bucket_size"] = config["allgather_bucket_size"] = bucket_elements(elements)


def gathered(tensors: Sequence[Any], write: bool = False) -> AbstractContextManager[Any]:
    """Those of `tensors` that ZeRO-3 keeps in shards are whole while active.

    With `write`, what every rank puts there stays.
    """
    shards = [tensor for tensor in tensors if hasattr(tensor, "ds_id")]
    if not shards:
        return nullcontext()
    from deepspeed.runtime.zero import GatheredParameters

    context: AbstractContextManager[Any] = GatheredParameters(shards, modifier_rank=0 if write else None)
    return context


def _whole_shape(parameter: Any) -> torch.Size:
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape
