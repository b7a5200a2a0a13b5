"""What `accelerate launch` or `torchrun` asked for, read from the environment and held against the recipe."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from drafttrain.errors import UserError
from drafttrain.recipe.schema import Recipe
from drafttrain.recipe.training_config import TrainingConfig

_HERE = "accelerate launch"


@dataclass(frozen=True)
class Launch:
    """A way of training over ranks.

    Attributes:
        kind: "replicated" (one process or DDP), "zero" (DeepSpeed) or "fsdp2".
        stage: of ZeRO, 0 to 3.
    """

    kind: Literal["replicated", "zero", "fsdp2"] = "replicated"
    stage: int = 0

    @property
    def name(self) -> str:
        """As a person says it."""
        return {"replicated": "no sharding", "zero": f"ZeRO-{self.stage}", "fsdp2": "FSDP2"}[self.kind]


def requested(environment: Mapping[str, str] = os.environ) -> Launch:
    """What the launcher asked for.

    Raises:
        UserError: something that is not installed, that accelerate would drop in silence, or that does not exist.
    """
    if _on(environment, "ACCELERATE_USE_DEEPSPEED"):
        _require_deepspeed(environment)
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        if stage not in ("0", "1", "2", "3"):
            raise UserError(f"there is no ZeRO stage {stage}", where=_HERE, remedy="zero_stage is 0, 1, 2 or 3")
        return Launch("zero", int(stage))
    if _on(environment, "ACCELERATE_USE_FSDP"):
        if environment.get("FSDP_VERSION", "1") != "2":
            raise UserError(
                "the launch config asks for FSDP 1, which is not supported",
                where=_HERE,
                remedy="set fsdp_version: 2, as recipes/accelerate/fsdp2.yaml does",
            )
        if _on(environment, "FSDP_OFFLOAD_PARAMS"):
            raise UserError("FSDP's offloading is not supported", where=_HERE, remedy="use fsdp_offload_params: false")
        return Launch("fsdp2")
    return Launch()


def _require_deepspeed(environment: Mapping[str, str]) -> None:
    if find_spec("deepspeed") is None:
        raise UserError(
            "the launch config asks for ZeRO, but DeepSpeed is not installed",
            where=_HERE,
            remedy="pip install 'drafttrain[deepspeed]', or use recipes/accelerate/ddp.yaml",
        )
    if _on(environment, "ACCELERATE_USE_CPU"):
        raise UserError(
            "ZeRO is asked for together with use_cpu, which would turn it into plain DDP",
            where=_HERE,
            remedy="set use_cpu: false: where there is no GPU, the CPU is taken all the same",
        )
    if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none") != "none":
        raise UserError(
            "a deepspeed_config_file is given; the recipe and zero_stage decide what it would say",
            where=_HERE,
            remedy="remove deepspeed_config_file; recipes/accelerate/zero2.yaml shows what is needed",
        )
    for part in ("OPTIMIZER", "PARAM"):
        if environment.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", "none") != "none":
            raise UserError(
                f"offloading ({part.lower()}) is not supported",
                where=_HERE,
                remedy=f"set offload_{part.lower()}_device: none; a higher ZeRO stage saves memory, too",
            )


def check_against_recipe(launch: Launch, recipe: Recipe, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a launch config that says something else than the recipe.

    Raises:
        UserError: naming both.
    """
    problems = [*_contradictions(recipe.training, environment)]
    if recipe.target.placement == "zero3" and not (launch.kind == "zero" and launch.stage in (1, 2)):
        problems.append(
            f"target.placement is zero3, which stands beside a draft under ZeRO-1 or ZeRO-2; the launch asks for "
            f"{launch.name}"
        )
    if recipe.training.compile and launch == Launch("zero", 3):
        raise UserError(
            "does not go with ZeRO-3, whose hooks gather weights inside of what is compiled",
            where="training.compile",
            remedy="use recipes/accelerate/zero2.yaml or fsdp2.yaml, or leave it off",
        )
    if problems:
        raise UserError(
            "; ".join(problems),
            where="launch config and recipe contradict each other",
            remedy="the recipe decides: leave these keys out of the launch config, or make them equal",
        )


def _contradictions(training: TrainingConfig, environment: Mapping[str, str]) -> list[str]:
    found = []
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no" and precision != training.precision:
        found.append(f"mixed_precision is {precision}, training.precision {training.precision}")
    steps = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    # 1 is what accelerate says when nobody asked.
    if steps not in ("auto", "1") and steps != str(training.accumulation):
        found.append(f"gradient_accumulation_steps is {steps}, training.accumulation {training.accumulation}")
    clipping = environment.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    if clipping not in ("auto", "none") and float(clipping) != (training.clip_norm or 0.0):
        found.append(f"gradient_clipping is {clipping}, training.clip_norm {training.clip_norm}")
    return found


def _on(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("1", "true", "yes")
