"""Recipes from files: combinations, shorthands, resolved recipes, provenance, bad files."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drafttrain.errors import RecipeError, UserError
from drafttrain.files import sha256_file
from drafttrain.recipe.load import load_config, load_recipe, save_recipe
from drafttrain.recipe.problems import InvalidRecipe
from drafttrain.recipe.provenance import (
    collect_provenance,
    git_revision,
    record_provenance,
    versions,
)
from drafttrain.recipe.schema import Recipe
from drafttrain.recipe.training_config import TrainingConfig

MINIMAL = """\
name: tiny
target: smollm2-135m
data:
  prompts: [{source: prompts.jsonl}]
drafter: {family: eagle3}
loss: {}
training: {epochs: 1}
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return path


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(InvalidRecipe) as caught:
        load_recipe(path, overrides)
    return [str(problem) for problem in caught.value.problems]


def test_a_target_may_be_one_word(minimal: Path) -> None:
    recipe = load_recipe(minimal)
    assert recipe.target.model == "smollm2-135m"
    assert load_recipe(minimal, ["target.dtype=float32"]).target.dtype == "float32"
    assert load_recipe(minimal, ["target=other/model"]).target.model == "other/model"


def test_the_run_folder_follows_the_name(minimal: Path) -> None:
    assert load_recipe(minimal).run_folder == "runs/tiny"
    assert load_recipe(minimal, ["output_dir=/elsewhere"]).run_folder == "/elsewhere"


def test_home_is_where_a_shell_says_that_it_is(minimal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` in YAML, or quoted on the command line, would be a folder of that name."""
    monkeypatch.setenv("HOME", "/home/me")
    recipe = load_recipe(minimal, ["output_dir=~/runs", "features={source: hybrid, path: ~/f}"])
    assert (recipe.run_folder, recipe.features.path) == ("/home/me/runs", "/home/me/f")


def test_the_training_seed_follows_the_recipes(minimal: Path) -> None:
    assert load_recipe(minimal, ["seed=3"]).training_seed == 3
    assert load_recipe(minimal, ["seed=3", "training.seed=4"]).training_seed == 4


def test_three_mistakes_are_shown_together(minimal: Path) -> None:
    """An unknown key, a wrong type and an impossible combination: one error, before anything is loaded."""
    minimal.write_text(MINIMAL.replace("epochs: 1", "epochs: 1, lr: quick, bach_rows: 2"), encoding="utf-8")
    assert sorted(problems(minimal, "evaluation.prompts=64")) == [
        "evaluation.prompts (override evaluation.prompts=64): 64 prompts are to be measured, "
        "data.held_out keeps 32 apart",
        "training.bach_rows (line 7): unknown key; did you mean 'batch_rows'?",
        'training.lr (line 7): got "quick", expected a number',
    ]


def test_the_error_names_the_file_and_counts(minimal: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(minimal, ["nane=x", "drafter.depth=0"])
    first, *rest = str(caught.value).splitlines()
    assert first == f"{minimal}: 2 problems"
    assert len(rest) == 2


_GIVEN = ("data.answers.source=given", "evaluation.prompts=0")
_STREAM = ("features.source=stream", "features.urls=[http://a:1]")
_VLLM = ("features.source=vllm", "features.urls=[http://a:1]", "features.exchange=/dev/shm/x")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.max_length=2048"], "data.max_length (override data.max_length=2048): samples of up to 2048"),
        (["data.answers.max_new_tokens=1024"], "do not fit data.max_length 1024"),
        (
            ["data.prompts=[{source: self, count: 5}]", "data.answers.source=given"],
            "data.prompts.0.source (override data.prompts=[{source: self, count: 5}]): prompts that the target",
        ),
        (
            ["data.prompts=[{source: self, count: 5}, {source: self, count: 9, seed: 1}, {source: self, count: 7}]"],
            "would write the prompts of data.prompts.0 again: give this source another seed",
        ),
        (["drafter={family: medusa, num_heads: 3}"], "drafter.num_heads is 3"),
        (["loss.terms=[{name: smooth_l1}]"], "family 'eagle3' does not predict"),
        (["drafter={family: draft_lm}", "features.source=offline"], "reads tokens, not features"),
        (["target={model: x, placement: elsewhere}", *_GIVEN], "computes nothing here: use features.source 'stream'"),
        (["target={model: x, placement: elsewhere}", *_GIVEN[:1], *_VLLM], "set evaluation.prompts to 0"),
        (["target={model: x, placement: zero3}", *_GIVEN, *_VLLM], "use features.source 'online'"),
        ([*_VLLM, "features.exchange=states"], "'states' must be an absolute path"),
        (
            ["target={model: x, placement: elsewhere}", *_GIVEN[:1], *_STREAM],
            "cannot be drafted for while training: set evaluation.prompts to 0",
        ),
        (["target={model: x, placement: zero3}", *_GIVEN, *_STREAM], "use features.source 'online'"),
        (["target={model: x, placement: zero3}", *_GIVEN, "training.prefetch=1"], "cannot run ahead of them"),
        (["target={model: x, placement: zero3}", *_GIVEN[1:]], "does not write answers"),
        (
            ["training.max_steps=5"],
            "training (line 7): give one of `epochs` and `max_steps`, and leave the other out or null",
        ),
        (["training.min_lr=1"], "min_lr 1 is above lr"),
        (["training.warmup=1.5"], "neither a share below 1 nor a whole number"),
        (["training.betas=[0.9, 1.0]"], "must lie in [0, 1)"),
        (["training.schedule=wsd", "training.warmup=0.9"], "are more than the whole run"),
        (["training={max_steps: 10, warmup: 10}"], "leaves nothing of max_steps 10"),
        (["name=../up"], "name"),
        (["name=suffix"], "'suffix' is the name of a reference in evaluations"),
    ],
)
def test_impossible_combinations_are_refused_by_name(minimal: Path, overrides: list[str], message: str) -> None:
    found = problems(minimal, *overrides)
    assert len(found) == 1
    assert message in found[0]


def test_a_temperature_that_cannot_be_sampled_at_is_refused(minimal: Path) -> None:
    """Case 30 of docs/cases.md."""
    answers, prompts = problems(minimal, "data.answers.temperature=1e-45", "data.prompts.0.temperature=1e-38")
    if "prompts" in answers:
        answers, prompts = prompts, answers
    assert answers.startswith("data.answers.temperature") and "must be 0 (greedy) or at least 1e-05" in answers
    assert prompts.startswith("data.prompts.0.temperature") and "must be at least 1e-05" in prompts


def test_all_combinations_are_checked_in_spite_of_other_mistakes(minimal: Path) -> None:
    found = problems(
        minimal,
        "seeed=1",
        "drafter={family: medusa, num_heds: 3}",
        "loss.terms=[{name: smooth_l1}]",
        "data.held_out=4",
    )
    assert len(found) == 5, found


def test_the_resolved_recipe_reloads_to_an_equal_one(minimal: Path, tmp_path: Path) -> None:
    overrides = ["training.lr=1e-5", "loss.terms=[{name: lk}, {name: ce, weight: 0.1}]", "drafter.taps=[2, final]"]
    recipe = load_recipe(minimal, overrides)
    written = save_recipe(recipe, tmp_path / "run")
    assert load_recipe(tmp_path / "run") == recipe
    assert load_recipe(written) == recipe
    # Written again it is the same file: nothing drifts over resumes.
    text = written.read_text(encoding="utf-8")
    save_recipe(load_recipe(written), tmp_path / "run")
    assert written.read_text(encoding="utf-8") == text
    assert not list((tmp_path / "run").glob("*.part"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(
    lr=st.floats(1e-8, 1.0),
    seed=st.integers(0, 2**40),
    model=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12),
    taps=st.none() | st.lists(st.integers(0, 9) | st.sampled_from(["final", "pre_norm"]), min_size=1, max_size=4),
)
def test_any_values_survive_the_round_trip(
    minimal: Path, tmp_path: Path, lr: float, seed: int, model: str, taps: list[int | str] | None
) -> None:
    recipe = load_recipe(minimal)
    raw = recipe.model_dump(mode="json")
    raw["training"]["lr"], raw["seed"], raw["target"]["model"], raw["drafter"]["taps"] = lr, seed, model, taps
    changed = Recipe.model_validate_json(json.dumps(raw), strict=True)
    assert load_recipe(save_recipe(changed, tmp_path / "run")) == changed


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_recipe(tmp_path / "missing.yaml")
    with pytest.raises(RecipeError, match=r"holds no recipe.yaml"):
        load_recipe(tmp_path)
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="is not UTF-8 text"):
        load_recipe(binary)
    binary.write_text("", encoding="utf-8")
    assert "name: missing" in problems(binary)


def test_other_schemas_load_the_same_way(tmp_path: Path) -> None:
    path = tmp_path / "training.yaml"
    path.write_text("epochs: 2\nlr: 1e-3\n", encoding="utf-8")
    assert load_config(TrainingConfig, path, ["accumulation=3"]).accumulation == 3
    with pytest.raises(InvalidRecipe, match="did you mean 'epochs'"):
        load_config(TrainingConfig, path, ["epoch=3"])


def test_warmup_and_decay_in_steps() -> None:
    share = TrainingConfig(epochs=1, schedule="wsd", warmup=0.1, decay_fraction=0.25)
    assert (share.warmup_steps(200), share.decay_steps(200)) == (20, 50)
    steps = TrainingConfig(max_steps=12, schedule="wsd", warmup=8, decay_fraction=0.5)
    assert (steps.warmup_steps(12), steps.decay_steps(12)) == (8, 4)


def test_provenance_says_what_ran(tmp_path: Path) -> None:
    data = tmp_path / "answers.jsonl"
    data.write_bytes(b"{}\n")
    entry = collect_provenance(
        target={"name": "t", "weights_hash": "1"},
        data={str(data): sha256_file(data)},
        command=["drafttrain", "train", "r"],
    )
    assert entry["command"] == ["drafttrain", "train", "r"]
    assert entry["data"] == {str(data): "ca3d163bab055381827226140568f3bef7eaac187cebd76878e0b63e9e442356"}
    assert entry["target"]["weights_hash"] == "1"
    assert {"python", "drafttrain", "torch", "transformers"} <= set(entry["versions"])
    assert entry["hardware"]["cores"] >= 1
    record_provenance(tmp_path, entry)
    record_provenance(tmp_path, {**entry, "command": ["again"]})
    launches = json.loads((tmp_path / "provenance.json").read_text(encoding="utf-8"))
    assert [launch["command"] for launch in launches] == [["drafttrain", "train", "r"], ["again"]]


def test_the_revision_is_that_of_the_checkout(tmp_path: Path) -> None:
    assert git_revision(tmp_path) is None

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / "file").write_text("1", encoding="utf-8")
    git("add", "file")
    git("commit", "-qm", "one")
    assert git_revision(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "file").write_text("2", encoding="utf-8")
    assert git_revision(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": True}


def test_versions_are_of_installed_packages_only() -> None:
    assert "torch" in versions()
    assert all(versions().values())
