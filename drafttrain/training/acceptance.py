"""Acceptance of a draft in training, measured in the engine that serves it, on prompts it was not trained on."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.build import serving_copy
from drafttrain.engine.acceptance import acceptance_counts, tau
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import build_proposer
from drafttrain.engine.records import Request
from drafttrain.recipe.training_config import EvaluationConfig
from drafttrain.targets.model import TargetModel
from drafttrain.training.callbacks import Acceptance


class EngineMeasurement:
    """Greedy speculative decoding of held-out prompts.

    Args:
        target: as it serves.
        prompts: token ids of each prompt.
        config: draft tokens a round, length and batch size.
        stop_ids: tokens that end an answer.
    """

    def __init__(
        self,
        target: TargetModel,
        prompts: Sequence[list[int]],
        config: EvaluationConfig,
        stop_ids: frozenset[int],
    ) -> None:
        self.target, self.config = target, config
        self.requests = [
            Request(str(index), ids, config.max_new_tokens, stop_ids=stop_ids) for index, ids in enumerate(prompts)
        ]

    def __call__(self, drafter: Drafter) -> Acceptance:
        """Measure a whole draft: a copy of it in the target's dtype."""
        began = time.perf_counter()
        config = self.config
        with torch.no_grad():
            proposer = build_proposer(serving_copy(drafter, self.target.dtype))
        longest = max(len(request.prompt_ids) for request in self.requests) + config.max_new_tokens
        engine = Engine(
            self.target,
            proposer,
            k=min(config.k, drafter.max_depth) if drafter.family == "medusa" else config.k,
            max_batch=min(config.batch_size, len(self.requests)),
            max_length=longest,
        )
        engine.generate(self.requests)
        accepted, reached, _ = acceptance_counts(engine.records)
        alpha = [kept / judged for kept, judged in zip(accepted, reached, strict=True) if judged]
        return Acceptance(
            tau=tau(engine.records) or 1.0,
            alpha=alpha + [0.0] * (config.k - len(alpha)),
            k=config.k,
            rounds=len(engine.records),
            seconds=time.perf_counter() - began,
        )
