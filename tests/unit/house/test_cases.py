"""docs/cases.md names tests that exist, and every case that code names is a row of it."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "cases.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+)(?: \*)? \|(.*)$", PAGE, flags=re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
# "case 12 of docs/cases.md", "cases 12, 13 and 14 of docs/cases.md"
MENTION = re.compile(r"\bcases? (\d+(?:(?:, | and )\d+)*) of docs/cases\.md", flags=re.IGNORECASE)


@cache
def functions(file: str) -> frozenset[str]:
    """Names of the tests in a file."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_case_has_a_number_of_its_own_and_a_test() -> None:
    assert [int(number) for number, _ in ROWS] == list(range(1, len(ROWS) + 1))
    assert [number for number, row in ROWS if not NAMED.search(row)] == []


def test_the_tests_that_it_names_exist() -> None:
    named = NAMED.findall(PAGE)
    assert len(named) == PAGE.count("::") >= len(ROWS) > 30
    missing = [f"{file}::{name}" for file, name in named if not (ROOT / file).is_file() or name not in functions(file)]
    assert missing == []


def test_every_case_that_is_named_is_a_row() -> None:
    numbers = {number for number, _ in ROWS}
    mentions: list[tuple[str, str]] = []
    for folder in ("tests", "drafttrain"):
        for file in (ROOT / folder).rglob("*.py"):
            for found in MENTION.findall(file.read_text(encoding="utf-8")):
                mentions += [(file.name, number) for number in re.findall(r"\d+", found)]
    assert len(mentions) > 30
    assert [(file, number) for file, number in mentions if number not in numbers] == []
