"""How far ahead batches are made, what that takes of memory, and how the time is told."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.recipe.load import load_recipe
from drafttrain.recipe.schema import Recipe
from drafttrain.training.ahead import batches_ahead
from drafttrain.training.interval import Interval
from drafttrain.training.plan.hardware import parse_gpus, this_machine
from drafttrain.training.plan.layout import ALONE, Layout
from drafttrain.training.plan.memory import peak
from drafttrain.training.plan.plan import make_plan, target_config

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"
STREAM = ["features.source=stream", "features.urls=[http://a:1]"]
AWAY = ["target.placement=elsewhere", "evaluation.every=null", "evaluation.prompts=0"]


def recipe(*overrides: str) -> Recipe:
    return load_recipe("recipes/eagle3_qwen3_8b.yaml", overrides)


@pytest.mark.parametrize(
    ("overrides", "on_gpu", "on_cpu"),
    [
        (["features.source=online"], 1, 0),
        (["features.source=hybrid"], 1, 0),
        (["features.source=offline"], 2, 2),
        (STREAM, 2, 2),
        (["features.source=vllm", "features.urls=[http://a:1]", "features.exchange=/x"], 2, 2),
        (["features.source=online", "training.prefetch=0"], 0, 0),
        (["features.source=online", "training.prefetch=3"], 3, 3),
        ([*STREAM, "training.prefetch=0"], 0, 0),
    ],
)
def test_what_suits_source_and_device(overrides: list[str], on_gpu: int, on_cpu: int) -> None:
    made = recipe(*overrides)
    assert (batches_ahead(made, on_cpu=False), batches_ahead(made, on_cpu=True)) == (on_gpu, on_cpu)
    assert batches_ahead(made, on_cpu=False, placement="zero3") == 0


def test_a_target_in_shards_never_runs_ahead() -> None:
    assert batches_ahead(load_recipe("recipes/eagle_llama70b.yaml"), on_cpu=False) == 0


def planned(gpus: str | None, *overrides: str) -> Any:
    text = target_config(recipe(), CONFIGS / "qwen3-8b")
    hardware = this_machine() if gpus is None else parse_gpus(gpus)
    return make_plan(recipe(*overrides), text, hardware, samples=100, tokens=500)


def test_the_plan_counts_what_is_made_ahead() -> None:
    """Features of a micro-batch: rows x tokens x (3 taps and the last state) x H 4096 x 2 bytes each."""
    made = recipe()
    each = made.training.batch_rows * made.training.row_length * 4 * 4096 * 2
    for source in (["features.source=offline"], [*STREAM, *AWAY]):
        peaks = [planned("1xB200", *source, f"training.prefetch={count}").memory_bytes for count in (1, 2, 5)]
        assert [after - before for before, after in pairwise(peaks)] == [each, 3 * each]
    # The target's forward goes on beside the draft's, and both are there at the peak.
    without, default = planned("1xB200", "training.prefetch=0"), planned("1xB200")
    (forward,) = [item for item in default.memory if item.name == "a forward of the target"]
    assert forward.phase == "always" and forward.nbytes > 0
    assert default.memory_bytes == without.memory_bytes + each + forward.nbytes
    shards = Layout("zero3", ALONE)
    assert shards not in default.peaks  # of one rank


def test_a_plan_that_does_not_fit_gives_up_what_is_made_ahead_first() -> None:
    needed = planned("1xB200", "training.prefetch=0").memory_bytes
    wide = planned("1xB200", "training.prefetch=8").memory_bytes
    hardware = parse_gpus("1xB200")
    text = target_config(recipe(), CONFIGS / "qwen3-8b")
    between = replace(hardware, memory=(needed + wide) // 2 + hardware.reserved)
    plan = make_plan(recipe("training.prefetch=8"), text, between, samples=100, tokens=500)
    assert not plan.fits and plan.fitting is not None and plan.fitting.changes == ("training.prefetch=0",)
    assert peak(make_plan(recipe("training.prefetch=0"), text, between, samples=100, tokens=500).memory) == needed


def test_waiting_is_told_from_what_the_target_took() -> None:
    interval = Interval.empty(2)
    interval.end_wait(3.0, 2.0, ahead=False)  # a second of laying out, two of the target
    assert (interval.seconds["waits"], interval.seconds["data"], interval.seconds["target"]) == (3.0, 1.0, 2.0)
    interval.end_wait(0.5, 2.0, ahead=True)  # the target ran meanwhile
    assert (interval.seconds["waits"], interval.seconds["data"], interval.seconds["target"]) == (3.5, 1.5, 4.0)


def test_checkpoints_from_before_batches_were_made_ahead_are_read() -> None:
    value = Interval(torch.ones(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64), steps=2).to_json()
    value["seconds"] = {"all": 9.0, "data": 1.0, "target": 2.0, "draft": 5.0}
    assert Interval.from_json(value, 1).seconds["waits"] == 3.0
