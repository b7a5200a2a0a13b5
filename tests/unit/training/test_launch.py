from __future__ import annotations

import pytest

from drafttrain.errors import UserError
from drafttrain.recipe.load import load_recipe
from drafttrain.training import launch as launching
from drafttrain.training.launch import Launch, check_against_recipe, requested
from drafttrain.training.strategies.base import bucket_elements

ZERO = {"ACCELERATE_USE_DEEPSPEED": "true"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, Launch()),
        ({**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, Launch("zero", 0)),
        ({**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, Launch("zero", 3)),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, Launch("fsdp2")),
    ],
)
def test_what_the_launcher_asked_for_is_read(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: Launch
) -> None:
    monkeypatch.setattr(launching, "find_spec", lambda name: object())
    assert requested(environment) == expected


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({**ZERO, "ACCELERATE_USE_CPU": "true"}, "use_cpu"),
        ({**ZERO, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "4"}, "no ZeRO stage 4"),
        ({**ZERO, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, "deepspeed_config_file"),
        ({**ZERO, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, "offloading"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP 1"),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": "true"}, "offloading"),
    ],
)
def test_what_would_not_run_as_asked_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    """Case 38 of docs/cases.md."""
    monkeypatch.setattr(launching, "find_spec", lambda name: object())
    with pytest.raises(UserError, match=said):
        requested(environment)


def test_zero_without_deepspeed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 38 of docs/cases.md."""
    monkeypatch.setattr(launching, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"DeepSpeed is not installed[^$]*drafttrain\[deepspeed\]"):
        requested(ZERO)


@pytest.mark.parametrize(
    ("environment", "overrides", "said"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, ["training.precision=fp32"], "mixed_precision is bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, [], "mixed_precision is fp16"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "3"}, ["training.accumulation=2"], "accumulation_steps is 3"),
        ({"ACCELERATE_GRADIENT_CLIPPING": "2.0"}, ["training.clip_norm=1.0"], "gradient_clipping is 2.0"),
    ],
)
def test_a_launch_config_that_contradicts_the_recipe_is_refused(
    environment: dict[str, str], overrides: list[str], said: str
) -> None:
    recipe = load_recipe("recipes/quickstart.yaml", overrides)
    check_against_recipe(Launch(), recipe, {})
    agreeing = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1"}
    check_against_recipe(Launch(), recipe, agreeing)
    with pytest.raises(UserError, match=said):
        check_against_recipe(Launch(), recipe, environment)


def test_a_target_in_shards_stands_beside_zero_1_and_2() -> None:
    recipe = load_recipe("recipes/eagle_llama70b.yaml", ["target.placement=zero3"])
    for stage in (1, 2):
        check_against_recipe(Launch("zero", stage), recipe, {})
    for wrong in (Launch(), Launch("zero", 3), Launch("fsdp2")):
        with pytest.raises(UserError, match=f"placement is zero3.*{wrong.name}"):
            check_against_recipe(wrong, recipe, {})


@pytest.mark.parametrize(("trained", "bucket"), [(7, 8), (8, 8), (10**9, 50_000_000)])
def test_buckets_are_no_larger_than_needed_and_even(trained: int, bucket: int) -> None:
    assert bucket_elements(trained) == bucket


def test_compiled_training_and_zero_3_are_told_apart() -> None:
    recipe = load_recipe("recipes/eagle3_qwen3_8b.yaml", ["training.compile=true"])
    for launch in (Launch(), Launch("fsdp2"), Launch("zero", 2)):
        check_against_recipe(launch, recipe, {})
    with pytest.raises(UserError, match=r"training\.compile: does not go with ZeRO-3[^$]*leave it off"):
        check_against_recipe(Launch("zero", 3), recipe, {})
