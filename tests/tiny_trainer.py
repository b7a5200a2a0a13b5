"""Trainers of tiny drafts over random documents, in the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.features.sources import OnlineFeatures
from drafttrain.losses.config import LossConfig
from drafttrain.losses.objective import Objective
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.recipe.training_config import TrainingConfig
from drafttrain.training.launch import Launch
from drafttrain.training.trainer import Trainer, TrainParts
from tests.tiny_training import samples, tiny_target

FAMILIES = {
    "eagle3": Eagle3Config(taps=(0, 2, 3), draft_vocab_size=40, depth=3),
    "eagle1": Eagle1Config(feature_noise=0.0),
    "medusa": MedusaConfig(num_heads=3),
    "draft_lm": DraftLMConfig(layers=(0, 3)),
}
CONFIGS = {
    **FAMILIES,
    # Draws random numbers while it trains, other ones wherever the batches are others.
    "eagle1-noise": Eagle1Config(feature_noise=0.5),
    "kept_head": Eagle3Config(taps=(0, 2, 3), draft_vocab_size=40, depth=2, train_head=False),
    "frozen_embedding": DraftLMConfig(layers=(0, 3), train_embedding=False),
}


class Recorder:
    """Keeps the records of a run."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_record(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def tiny_config(**values: Any) -> TrainingConfig:
    """For short runs of which every step is logged."""
    common = {"row_length": 64, "precision": "fp32", "log_every": 1, "save_every": None, "packing": False}
    return TrainingConfig(**{**common, **values})


def tiny_trainer(
    accelerator: Accelerator,
    config: TrainingConfig,
    folder: Path,
    family: str = "eagle3",
    data: list[Sample] | None = None,
    target: CausalLM | None = None,
    drafter: Drafter | None = None,
    launch: Launch | None = None,
) -> Trainer:
    """A trainer of `drafter`, or of a fresh draft of a family in `CONFIGS`; over `data`, or 16 documents."""
    target = target or tiny_target()
    if drafter is None:
        torch.manual_seed(3)
        drafter = build_drafter(CONFIGS[family], target.config)
        init_from_target(drafter, target)
    parts = TrainParts(
        drafter=drafter,
        objective=Objective(LossConfig()),
        source=OnlineFeatures(target, drafter.feature_spec, batch_tokens=64),
        samples=data if data is not None else samples(16),
        target_head=target.head(),
        ahead=config.prefetch or 0,
    )
    return Trainer(accelerator, config, parts, folder, seed=0, fingerprint={}, launch=launch)
