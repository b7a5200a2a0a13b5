from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.bench.suite import load_suite
from drafttrain.errors import DataError, RecipeError, UserError


def write(folder: Path, text: str) -> Path:
    path = folder / "suite.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["core", "humaneval"])
def test_shipped_suites_load_with_their_prompts(name: str) -> None:
    suite = load_suite(f"eval/suites/{name}.yaml")
    prompts = suite.load_prompts()
    assert suite.name == name and 0.0 in suite.temperatures and 1.0 in suite.temperatures
    assert len(prompts) == {"core": 96, "humaneval": 164}[name]


def test_core_covers_eight_categories_of_twelve_with_multi_turn_and_non_english() -> None:
    prompts = load_suite("eval/suites/core.yaml").load_prompts()
    categories = [prompt.category for prompt in prompts]
    assert {categories.count(category) for category in set(categories)} == {12}
    assert len(set(categories)) == 8
    assert any(len(prompt.turns) > 1 for prompt in prompts)
    text = "".join(turn for prompt in prompts for turn in prompt.turns)
    for first, last in (("一", "鿿"), ("؀", "ۿ"), ("\U0001f300", "\U0001faff")):
        assert any(first <= character <= last for character in text)


def test_overrides_apply(tmp_path: Path) -> None:
    path = write(tmp_path, "name: x\nprompts: humaneval\n")
    suite = load_suite(path, ["limit=3", "temperatures=[0.5]", "drafts=[ngram]"])
    assert (suite.limit, suite.temperatures, suite.drafts) == (3, [0.5], ["ngram"])
    assert len(suite.load_prompts()) == 3


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "name: x\nprompts: humaneval\ntemperature: [0]\nk: [0]\ndrafts: [ngrm]\n")
    with pytest.raises(RecipeError) as error:
        load_suite(path, ["batch=two", "limit=0"])
    for part in ("temperatures", "k.0", "ngram", "batch", "limit"):
        assert part in str(error.value)


@pytest.mark.parametrize("value", ["1e-45", "1e-38", "9.0e-6"])
def test_a_temperature_that_cannot_be_sampled_at_is_no_setting(tmp_path: Path, value: str) -> None:
    """Case 30 of docs/cases.md: logits over it are infinite, or 0 / 0."""
    path = write(tmp_path, "name: x\nprompts: humaneval\n")
    with pytest.raises(RecipeError, match=r"temperatures[^$]*must be 0 \(greedy\) or at least 1e-05"):
        load_suite(path, [f"temperatures=[0.0, {value}]"])
    assert load_suite(path, ["temperatures=[0, 1.0e-5]"]).temperatures == [0.0, 1e-5]


def test_a_setting_listed_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="twice"):
        load_suite(write(tmp_path, "name: x\nprompts: p.jsonl\nk: [4, 4]\n"))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        load_suite(tmp_path / "nowhere.yaml")
    suite = load_suite(write(tmp_path, "name: x\nprompts: nowhere.jsonl\n"))
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        suite.load_prompts()


def test_trees(tmp_path: Path) -> None:
    path = write(tmp_path, "name: x\nprompts: p.jsonl\ntrees: [{branching: [3, 2]}, {dynamic: {nodes: 20}}]\n")
    assert [str(tree) for tree in load_suite(path).trees] == ["static 3x2", "dynamic 20 (depth 6, top-k 10)"]
    assert [tree.build().nodes for tree in load_suite(path).trees] == [9, 20]
    for tree, message in {
        "{branching: [8, 8]}": "more than 64 nodes",
        "{parents: [0]}": "parent 0",
        "{branching: [2], dynamic: {}}": "not branching and dynamic",
        "{file: nowhere.json}": "no such file",
        "{sampled: true}": "not none",
        "{dynamic: {}, sampled: true}": "static trees only",
        "{branching: [2]}, {branching: [2]}": "twice",
    }.items():
        with pytest.raises(RecipeError, match=message):
            load_suite(write(tmp_path, f"name: x\nprompts: p.jsonl\ntrees: [{tree}]\n"))
    path = write(tmp_path, "name: x\nprompts: p.jsonl\ndrafts: [ngram]\ntrees: [{branching: [2]}]\n")
    with pytest.raises(RecipeError, match="draft under test"):
        load_suite(path)


def test_the_shipped_suite_of_ceilings_loads() -> None:
    suite = load_suite("eval/suites/ceiling.yaml")
    assert sorted(suite.k) == [2, 4, 8] and suite.drafts == ["run", "oracle"]
    assert (suite.temperatures, suite.batch) == ([0.0], [1])


def test_the_shipped_suite_of_drafts_loads() -> None:
    suite = load_suite("eval/suites/drafts.yaml")
    assert len(suite.drafts) == 8 and len(suite.load_prompts()) == 16


def test_drafts_of_one_line(tmp_path: Path) -> None:
    lines = """
  - suffix
  - {synthetic: 0.7}
  - {early_exit: 10}
  - {early_exit: 10, tree: {branching: [2, 2]}}
  - {cascade: [ngram, {early_exit: 4}, {early_exit: 12}]}
  - {draft: runs/small, device: cpu}
  - {router: [suffix, run], min_match: 3}
  - {router: [ngram, {use: run, tree: {dynamic: {nodes: 20}}}], name: both}
"""
    suite = load_suite(write(tmp_path, f"name: x\nprompts: p.jsonl\ndrafts: {lines}"))
    assert [str(entry) for entry in suite.drafts] == [
        "suffix",
        "synthetic 0.7",
        "early exit 10",
        "early exit 10 static 2x2",
        "ngram > early exit 4 > early exit 12",
        "runs/small on cpu",
        "suffix or run",
        "ngram or run dynamic 20 (depth 6, top-k 10)",
    ]
    assert suite.uses_run and not load_suite(tmp_path / "suite.yaml", ["drafts=[suffix]"]).uses_run


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{early_exit: 4, skip: a.json}", "not early_exit and skip"),
        ("{name: a}", "not none"),
        ("{cascade: [ngram, {early_exit: 4}, {early_exit: 4}]}", "contains itself"),
        ("{cascade: [{cascade: [ngram, run]}, run]}", "contains itself"),
        ("{cascade: [ngram, {early_exit: 4, tree: {branching: [2]}}]}", "leave out the tree"),
        ("{router: [run, ngram]}", "begins with ngram or suffix"),
        ("{early_exit: 4, min_match: 2}", "belong to a router"),
        ("{use: ngram, tree: {branching: [2]}}", "proposes chains alone"),
        ("{synthetic: 1.5}", "at most 1"),
        ("{early_exit: 4}, {early_exit: 4}", "twice"),
        ("{early_exit: 4, device: cpu}", "early_exit runs where the target does"),
        ("{use: ngram, device: cpu}", "ngram runs where the target does"),
        ("{erly_exit: 4}", "did you mean 'early_exit'"),
    ],
)
def test_drafts_that_cannot_be(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_suite(write(tmp_path, f"name: x\nprompts: p.jsonl\ndrafts: [{line}]\n"))
