"""Scalars, lines, duplicate keys, forbidden tags, overrides, and dumping back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.errors import RecipeError
from drafttrain.recipe.yaml_source import Source, apply_overrides, dump_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("no", "no"),
        ("true", True),
        ("1e-4", 1e-4),
        ("3.0e-4", 3e-4),
        (".5", 0.5),
        ("010", 10),
        ("-3", -3),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("~", None),
        ("", None),
        ("null", None),
        ("'1e-4'", "1e-4"),
        ("[1, a, 2.5]", [1, "a", 2.5]),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    assert parse_yaml(f"key: {text}", "r.yaml").data == {"key": value}


def test_lines_are_kept() -> None:
    source = parse_yaml("a: 1\nb:\n  c:\n    - x\n    - d: 2\n", "r.yaml")
    assert source.origin(("a",)) == "line 1"
    assert source.origin(("b", "c", 0)) == "line 4"
    assert source.origin(("b", "c", 1, "d")) == "line 5"
    assert source.origin(("b", "c", 7, "missing")) == "line 3"
    assert source.origin(("nowhere",)) is None


def test_duplicate_keys_are_all_reported() -> None:
    source = parse_yaml("a: 1\nb: {c: 1, c: 2}\na: 2\n", "r.yaml")
    assert [str(problem) for problem in source.problems] == [
        "b.c (line 2): given twice, first on line 2",
        "a (line 3): given twice, first on line 1",
    ]
    assert source.data == {"a": 1, "b": {"c": 1}}


def test_merge_keys_are_refused_by_name() -> None:
    source = parse_yaml("a: &x {k: 1}\nb:\n  <<: *x\n  l: 2\n", "r.yaml")
    assert [str(problem) for problem in source.problems] == [
        "b (line 3): merge keys (<<) are of YAML 1.1 and not read: write the keys out"
    ]


def test_tags_cannot_run_code() -> None:
    source = parse_yaml("a: !!python/object/apply:os.getcwd []\nb: !!python/name:os.system x\n", "r.yaml")
    assert len(source.problems) == 2
    assert source.data == {"a": None, "b": None}


def test_an_alias_may_repeat_but_not_contain_itself() -> None:
    assert parse_yaml("a: &x {k: 1}\nb: *x\n", "r.yaml").data == {"a": {"k": 1}, "b": {"k": 1}}
    assert "contains itself" in str(parse_yaml("a: &x [*x]\n", "r.yaml").problems[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2", r"r\.yaml: line \d: not valid YAML"),
        ("- 1", "expected keys and values"),
        ("a: 1\nb: \x00", r"line 2: not valid YAML: the character '\\x00' cannot stand in YAML"),
        pytest.param("a: " + "[" * 10_000, "nested too deeply", id="deep"),
    ],
)
def test_what_is_no_recipe_at_all(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_yaml(text, "r.yaml")


def test_an_empty_file_has_no_keys() -> None:
    assert parse_yaml("# nothing\n", "r.yaml").data == {}


def overridden(text: str, *overrides: str) -> Source:
    source = parse_yaml(text, "r.yaml")
    apply_overrides(source, overrides, {"target": "model"})
    return source


def test_overrides_reach_into_mappings_and_lists() -> None:
    source = overridden("a: {b: [1, {c: 2}]}", "a.b.1.c=3e-4", "a.b.0=[x, y]", "new.deep=off", "z={k: 1}", "e=")
    assert source.problems == []
    assert source.data == {
        "a": {"b": [["x", "y"], {"c": 3e-4}]},
        "new": {"deep": "off"},
        "z": {"k": 1},
        "e": None,
    }
    assert source.origin(("a", "b", 1, "c")) == "override a.b.1.c=3e-4"


def test_a_value_may_hold_an_equals_sign() -> None:
    assert overridden("", "a=b=c").data == {"a": "b=c"}


def test_an_override_goes_through_a_shorthand() -> None:
    source = overridden("target: smollm2-135m", "target.dtype=float32")
    assert source.data == {"target": {"model": "smollm2-135m", "dtype": "float32"}}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("a.b", "key=value"),
        ("=3", "key=value"),
        ("a..b=3", "key=value"),
        ("a.x.0=3", "'x' is no index of a list of 1"),
        ("a.1=3", "'1' is no index of a list of 1"),
        ("b.c=3", "single value 5, which has no key 'c'"),
        ("d.0.e=3", "give it whole: d=[...]"),
        ("b=[1", "not valid YAML"),
        ("b={x: 1, x: 2}", "given twice"),
    ],
)
def test_overrides_that_do_not_apply_are_problems(override: str, message: str) -> None:
    source = overridden("a: [{x: 1}]\nb: 5\n", override)
    assert len(source.problems) == 1
    assert message in str(source.problems[0])
    assert override in str(source.problems[0])


_SCALAR = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
    | st.sampled_from(["1e-3", "off", "010", "null", "", " a", "2026-01-01", "0x1f", "1:30", "+.inf", "-", "=", "<<"])
)
_KEY = st.text("abcdefgh_10", min_size=1, max_size=8)
_VALUE = st.recursive(
    _SCALAR,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEY, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(_KEY, _VALUE, max_size=4))
def test_what_is_dumped_is_read_back(data: dict[str, Any]) -> None:
    back = parse_yaml(dump_yaml(data), "r.yaml")
    assert back.problems == []
    assert back.data == data
    assert str(back.data) == str(data)  # equality would take 1.0 for 1
