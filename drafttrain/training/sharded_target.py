"""A frozen target whose blocks lie in shards over the ranks: its own ZeRO-3 engine beside the draft's (ZeRO-1 or 2).

A forward gathers block after block and lets each go again, so no rank ever holds the target. What the draft reads on
every rank stays whole: embedding, head and norms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from drafttrain.drafters.base import DraftBatch
from drafttrain.features.layout import Rows
from drafttrain.features.sources import FeatureSource
from drafttrain.modeling.causal_lm import CausalLMOutput, find_body
from drafttrain.modeling.course import Course
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import Tap
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.identity import TargetIdentity
from drafttrain.targets.load import load_target
from drafttrain.targets.model import TargetModel
from drafttrain.training.strategies.zero import gathered


class ShardedTarget(TargetModel):
    """A target that the ranks run together.

    A forward is a collective: ranks that have fewer of them to make join those of the others in `join`.
    """

    def __init__(self, hf: Any, tokenizer: Any, identity: TargetIdentity) -> None:
        self._in_step = False
        super().__init__(hf, tokenizer, identity)
        # The proof of its forward, above, is made by all ranks at once.
        self._in_step = True

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        cache: StaticKVCache | None = None,
        taps: Iterable[Tap] = (),
        course: Course | None = None,
        states: torch.Tensor | None = None,
    ) -> CausalLMOutput:
        """As any target's, by all ranks together."""
        if self._in_step:
            self._some_rank_runs(True)
        return super().forward(ids, positions, cache, taps, course, states)

    @torch.inference_mode()
    def join(self) -> None:
        """Take part in the forwards that other ranks still make, until all have joined."""
        while self._some_rank_runs(False):
            super().forward(torch.zeros(1, 1, dtype=torch.int64, device=self.device))

    def _some_rank_runs(self, this_one: bool) -> bool:
        running = torch.tensor(int(this_one), device=self.device)
        dist.all_reduce(running, op=dist.ReduceOp.MAX)
        return bool(running.item())

    def prepare_for_inference(self) -> None:
        """Shards cannot be laid out anew."""

    def blocks_at_hand(self, blocks: Iterable[int]) -> AbstractContextManager[None]:
        """While active, the weights of `blocks` are whole on every rank."""
        weights: list[Any] = [weight for block in blocks for weight in self.layers[block].parameters()]
        return gathered([weight for weight in weights if not weight.ds_persist])


class TogetherFeatures:
    """A feature source over a `ShardedTarget`: no rank goes on before all have their features."""

    def __init__(self, source: FeatureSource, target: ShardedTarget) -> None:
        self._source, self._target = source, target

    @property
    def target_s(self) -> float:
        """Seconds spent so far in the target itself."""
        return self._source.target_s

    @target_s.setter
    def target_s(self, value: float) -> None:
        self._source.target_s = value

    def batch(self, rows: Rows, device: torch.device) -> DraftBatch:
        """See `FeatureSource`."""
        batch = self._source.batch(rows, device)
        self._target.join()
        return batch

    def close(self) -> None:
        """See `FeatureSource`."""
        self._source.close()


def load_sharded_target(config: TargetConfig) -> ShardedTarget:
    """Load a target in shards; every rank must call it. Needs the process group.

    Raises:
        TargetError: see `load_target`.
    """

    def build(load: Callable[[], Any], device: torch.device) -> Any:
        return _in_shards(load, config.dtype)

    target = load_target(config, build, ShardedTarget)
    assert isinstance(target, ShardedTarget)
    return target


def _in_shards(load: Callable[[], Any], dtype: str) -> Any:
    import deepspeed
    from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": dtype == "bfloat16"},
        "fp16": {"enabled": dtype == "float16"},
    }
    # While this object lives, transformers reads each weight into its shard and the whole model is nowhere.
    sharding = HfDeepSpeedConfig(config)  # type: ignore[no-untyped-call]
    try:
        hf = load()
    finally:
        del sharding
        unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]
    hf.requires_grad_(False).eval()
    # The body and not the whole: DeepSpeed learns the order of its gathers from the module that is called each time.
    deepspeed.initialize(model=find_body(hf), config=config)
    hf.eval()
    ends = [module.weight for module in (hf.get_input_embeddings(), hf.get_output_embeddings()) if module is not None]
    norms = [parameter for parameter in hf.parameters() if len(parameter.ds_shape) == 1]
    kept = list({id(parameter): parameter for parameter in [*ends, *norms]}.values())
    for parameter in kept:
        parameter.ds_persist = True
        # Until DeepSpeed knows that order it releases what a module had, unless some module still uses it.
        parameter.ds_active_sub_modules.add("kept whole")
    kept[0].all_gather(param_list=kept)
    return hf
