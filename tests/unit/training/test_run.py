"""What a run does with its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from drafttrain.errors import RecipeError
from drafttrain.recipe.load import load_recipe
from drafttrain.training.run import begin_anew, train_recipe
from tests.tiny_world import make_world, recipe


def test_a_fresh_start_leaves_no_draft_of_an_earlier_run_in_the_place_of_its_own(tmp_path: Path) -> None:
    files = ("recipe.yaml", "recipe-until-step-00000012.yaml", "metrics.jsonl")
    folders = ("best", "draft", "best-adapter", "draft-adapter")
    for name in files:
        (tmp_path / name).touch()
    for name in (*folders, "data", "checkpoints.1"):
        (tmp_path / name).mkdir()
    begin_anew(tmp_path)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == sorted(["data", "checkpoints.1", *(f"{name}.1" for name in (*files, *folders))])


def test_the_draft_that_a_run_starts_from_stays(tmp_path: Path) -> None:
    for name in ("best", "draft"):
        (tmp_path / name).mkdir()
    begin_anew(tmp_path, str(tmp_path / "draft"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.1", "draft"]


def test_adapters_are_not_trained_on_a_draft_that_the_run_replaces(tmp_path: Path) -> None:
    world, run = make_world(tmp_path), tmp_path / "run"
    drafter = {"family": "eagle3", "warm_start": str(run / "best"), "lora": {"rank": 2}}
    with pytest.raises(RecipeError, match=r"drafter.warm_start: .*best is a draft of this very run"):
        train_recipe(load_recipe(recipe(world, run, drafter=drafter)), "auto", Console(quiet=True))
