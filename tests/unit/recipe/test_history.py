from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.errors import RecipeError
from drafttrain.recipe.history import changes, check_changes, earlier_name, keep_recipe
from drafttrain.recipe.load import load_recipe, save_recipe
from drafttrain.recipe.schema import Recipe


def quickstart(*overrides: str) -> Recipe:
    return load_recipe("recipes/quickstart.yaml", overrides)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder."""
    save_recipe(quickstart(), tmp_path)
    return tmp_path


def test_a_run_without_a_recipe_or_with_the_same_has_no_changes(
    run: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert changes(tmp_path_factory.mktemp("new"), quickstart()) == {}
    assert changes(run, quickstart()) == {}
    assert keep_recipe(quickstart(), run, 5, {}) is None
    assert [path.name for path in run.iterdir()] == ["recipe.yaml"]


def test_a_key_that_did_not_exist_had_its_default(run: Path) -> None:
    text = (run / "recipe.yaml").read_text().splitlines()
    (run / "recipe.yaml").write_text("\n".join(line for line in text if "clip_norm" not in line))
    assert set(changes(run, quickstart("training.clip_norm=1.0"))) == set()
    assert set(changes(run, quickstart("training.clip_norm=2.0"))) == {"training.clip_norm"}


def test_the_recipe_of_earlier_steps_stays(run: Path) -> None:
    now = quickstart("training.lr=0.5", "loss.decay=0.7")
    found = changes(run, now)
    assert set(found) == {"training.lr", "loss.decay"} and found["training.lr"][1] == 0.5
    said = keep_recipe(now, run, 300, found)
    assert said is not None and "from step 300" in said and "-> 0.5" in said and earlier_name(300) in said
    assert load_recipe(run) == now
    assert load_recipe(run / earlier_name(300)) == quickstart()


def test_a_change_that_trained_nothing_leaves_no_trace(run: Path) -> None:
    between, last = quickstart("training.lr=0.5"), quickstart("training.lr=0.25")
    keep_recipe(between, run, 300, changes(run, between))
    # Killed before the next checkpoint, and started again at the same step.
    keep_recipe(last, run, 300, changes(run, last))
    assert load_recipe(run) == last
    assert load_recipe(run / earlier_name(300)) == quickstart()
    assert sorted(path.name for path in run.iterdir()) == [earlier_name(300), "recipe.yaml"]


def test_before_the_first_step_nothing_is_kept(run: Path) -> None:
    now = quickstart("training.lr=0.5")
    assert keep_recipe(now, run, 0, changes(run, now)) is None
    assert [path.name for path in run.iterdir()] == ["recipe.yaml"]


def test_what_no_step_would_be_trained_by_is_refused(run: Path) -> None:
    found = changes(run, quickstart("training.lr=0.5"))
    check_changes(run, found, 10, 20, measured=True)
    with pytest.raises(RecipeError, match=r"has done its 20 steps[^$]*training\.lr[^$]*max_steps"):
        check_changes(run, found, 20, 20, measured=True)
    # Where and how often something is written shapes no draft.
    check_changes(run, changes(run, quickstart("training.keep=9", "name=other")), 20, 20, measured=True)


def test_the_best_draft_is_chosen_by_one_yardstick(run: Path) -> None:
    found = changes(run, quickstart("evaluation.k=2"))
    check_changes(run, found, 10, 20, measured=False)
    with pytest.raises(RecipeError, match=r"another measurement: evaluation\.k \d -> 2"):
        check_changes(run, found, 10, 20, measured=True)
