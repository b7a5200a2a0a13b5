"""The whole recipe. Each section's class stands beside its component; only this file knows them all."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from drafttrain.config import Config, Place
from drafttrain.corpus.config import DataConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.features.config import FeaturesConfig
from drafttrain.losses.config import LossConfig
from drafttrain.recipe.training_config import EvaluationConfig, TrackingConfig, TrainingConfig
from drafttrain.targets.config import TargetConfig

SHORTHANDS = {"target": "model"}
"""Sections that may be written as one string, and the key it stands for: `target: smollm2-135m`."""

RESOLVED = "recipe.yaml"
"""Name of the resolved recipe in a run's folder."""
CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints."""

REFERENCES = ("none", "ngram", "suffix", "oracle")
"""What evaluations measure beside a run's draft, by name: no run can have one of these."""


def _expand_target(value: Any) -> Any:
    return {SHORTHANDS["target"]: value} if isinstance(value, str) else value


def _no_reference(name: str) -> str:
    if name in REFERENCES:
        raise ValueError(f"{name!r} is the name of a reference in evaluations: choose another")
    return name


class Recipe(Config):
    """From prompts to a measured draft.

    Attributes:
        name: names the run and its folder.
        seed: of the draft's initialisation, the order of samples and noise. Prompts and answers have seeds of
            their own, so that runs with different seeds train on the same data.
        output_dir: the run's folder; `runs/<name>` unless given.
        target: the model that is drafted for; a name alone is enough.
        data: prompts, and where their answers come from.
        features: where the target's states come from while training.
        drafter: the family and its shape.
        loss: weighted terms.
        training: optimisation.
        evaluation: acceptance measured while training.
        tracking: wandb.
    """

    name: Annotated[str, AfterValidator(_no_reference)] = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0)
    output_dir: Place | None = None
    target: Annotated[TargetConfig, BeforeValidator(_expand_target)]
    data: DataConfig
    features: FeaturesConfig = FeaturesConfig()
    drafter: DrafterConfig
    loss: LossConfig
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def run_folder(self) -> str:
        """Where the run writes."""
        return self.output_dir or f"runs/{self.name}"

    @property
    def training_seed(self) -> int:
        """Seed of initialisation, order and noise."""
        return self.seed if self.training.seed is None else self.training.seed
