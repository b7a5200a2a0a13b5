"""Every problem at once, each with its path, its line, what was got and what was meant."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import pytest
from pydantic import Field, model_validator

from drafttrain.config import Config
from drafttrain.recipe.validate import Validated, validate
from drafttrain.recipe.yaml_source import apply_overrides, parse_yaml


class Eagle(Config):
    family: Literal["eagle"] = "eagle"
    depth: int = Field(7, ge=1, le=16)
    taps: list[int | str] | None = None


class Medusa(Config):
    family: Literal["medusa"] = "medusa"
    num_heads: int = Field(5, ge=1)


class Term(Config):
    name: Literal["forward_kl", "ce", "tv"]
    weight: float = Field(1.0, gt=0)


class Training(Config):
    epochs: float | None = None
    lr: float = Field(1e-3, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    packing: bool = True
    schedule: Literal["wsd", "cosine", "constant"] = "cosine"

    @model_validator(mode="after")
    def _lengthy(self) -> Self:
        if self.epochs is None:
            raise ValueError("give `epochs`")
        return self


class Whole(Config):
    name: str
    seed: int = Field(0, ge=0)
    drafter: Annotated[Eagle | Medusa, Field(discriminator="family")]
    terms: list[Term] = Field(default_factory=list)
    training: Training = Training(epochs=1)


GOOD = "name: x\ndrafter: {family: eagle}\n"


def check(text: str, *overrides: str) -> Validated:
    source = parse_yaml(text, "r.yaml")
    apply_overrides(source, overrides)
    return validate(Whole, source)


def messages(text: str, *overrides: str) -> list[str]:
    return [str(problem) for problem in check(text, *overrides).problems]


def test_a_good_recipe_has_no_problems() -> None:
    result = check(GOOD + "terms: [{name: ce, weight: 2}]\ntraining: {epochs: 2, betas: [0.8, 0.9]}\n")
    assert result.problems == []
    assert result.sections["terms"] == [Term(name="ce", weight=2.0)]
    assert result.sections["training"] == Training(epochs=2, betas=(0.8, 0.9))
    assert result.sections["seed"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drafter: {family: eagle}", "name: missing"),
        (GOOD + "traning: {}", "traning (line 3): unknown key; did you mean 'training'?"),
        (GOOD + "lr: 1e-3", "lr (line 3): unknown key; did you mean 'training.lr'?"),
        (GOOD + "zzz: 1", "zzz (line 3): unknown key; known here: name, seed, drafter, terms, training"),
        (GOOD + "seed: -1", "seed (line 3): got -1, must be at least 0"),
        (GOOD + "seed: '1'", 'seed (line 3): got "1", expected an integer'),
        (GOOD + "seed: true", "seed (line 3): got true, expected an integer"),
        (GOOD + "seed: 1.5", "seed (line 3): got 1.5, expected an integer"),
        (
            GOOD + "training: {epochs: 1, packing: 1}",
            "training.packing (line 3): got 1, expected true or false",
        ),
        (GOOD + "training: 5", "training (line 3): got 5, expected keys and values"),
        (GOOD + "terms: {name: ce}", 'terms (line 3): got {"name": "ce"}, expected a list'),
        (GOOD + "terms: [{weight: 1}]", "terms.0.name (line 3): missing"),
        (
            GOOD + "training:\n  epochs: 1\n  schedule: cosin",
            "training.schedule (line 5): got \"cosin\", expected 'wsd', 'cosine' or 'constant'; did you mean 'cosine'?",
        ),
        (
            GOOD + "terms:\n- {name: ce}\n- {name: fwd_kl}",
            "terms.1.name (line 5): got \"fwd_kl\", expected 'forward_kl', 'ce' or 'tv'; did you mean 'forward_kl'?",
        ),
        ("name: x\ndrafter: {depth: 3}", "drafter.family (line 2): missing"),
        (
            "name: x\ndrafter:\n  family: medusas",
            "drafter.family (line 3): got \"medusas\", expected one of eagle, medusa; did you mean 'medusa'?",
        ),
        (
            "name: x\ndrafter: {family: eagle, dept: 3}",
            "drafter.dept (line 2): unknown key; did you mean 'depth'?",
        ),
        (
            "name: x\ndrafter: {family: medusa, depth: 3}",
            "drafter.depth (line 2): unknown key; known here: family, num_heads",
        ),
        (
            "name: x\ndrafter: {family: eagle, depth: 99}",
            "drafter.depth (line 2): got 99, must be at most 16",
        ),
        (
            "name: x\ndrafter:\n  family: eagle\n  taps:\n  - 2\n  - [3]",
            "drafter.taps.1 (line 6): got [3], expected an integer or a string",
        ),
        (
            GOOD + "training: {epochs: 1, lr: .inf}",
            "training.lr (line 3): got Infinity, expected a finite number",
        ),
        (GOOD + "training: {}", "training (line 3): give `epochs`"),
    ],
)
def test_one_mistake_is_one_problem(text: str, message: str) -> None:
    assert messages(text) == [message]


def test_all_mistakes_are_reported_together() -> None:
    text = "drafter:\n  family: eagle\n  dept: 3\ntraining:\n  epochs: 1\n  lr: fast\n  shedule: cosine\nseeed: 3\n"
    assert sorted(messages(text)) == [
        "drafter.dept (line 3): unknown key; did you mean 'depth'?",
        "name: missing",
        "seeed (line 8): unknown key; did you mean 'seed'?",
        'training.lr (line 6): got "fast", expected a number',
        "training.shedule (line 7): unknown key; did you mean 'schedule'?",
    ]


def test_a_misspelt_key_hides_no_other_problem() -> None:
    """The value of a misspelt key is checked under its right name, and so is what depends on it."""
    assert messages(GOOD + "training: {epoch: 1}") == ["training.epoch (line 3): unknown key; did you mean 'epochs'?"]
    assert messages(GOOD + "training: {learning: 1}") == [
        "training.learning (line 3): unknown key; known here: epochs, lr, betas, packing, schedule",
        "training (line 3): give `epochs`",
    ]


def test_a_misspelt_discriminator_hides_no_other_problem() -> None:
    assert messages("name: x\ndrafter: {family: eagel, dept: 3}\n") == [
        "drafter.family (line 2): got \"eagel\", expected one of eagle, medusa; did you mean 'eagle'?",
        "drafter.dept (line 2): unknown key; did you mean 'depth'?",
    ]


def test_overrides_are_named_as_the_origin() -> None:
    assert messages(GOOD, "training.lr=0", "training.epochs=1") == [
        "training.lr (override training.lr=0): got 0, must be above 0"
    ]


@pytest.mark.parametrize("value", ["null", "[]", "text", "3", "{}", "{family: [1]}", "{family: {a: 1}}"])
def test_any_shape_gives_problems_not_crashes(value: str) -> None:
    result: Any = check(f"name: x\ndrafter: {value}\nterms: [{value}]\n")
    assert result.problems
