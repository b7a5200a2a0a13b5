"""What is wrong with a recipe: a list of problems that becomes one error."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.errors import RecipeError

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Problem:
    """One thing to mend.

    Attributes:
        path: keys and list indices from the root of the recipe; empty for the whole.
        message: what is wrong, without the path.
        origin: where the value was written: "line 12" or "override a.b=3"; None when it is written nowhere.
    """

    path: KeyPath
    message: str
    origin: str | None = None

    def __str__(self) -> str:
        place = dotted(self.path)
        if self.origin is not None:
            place = f"{place} ({self.origin})" if place else self.origin
        return f"{place}: {self.message}" if place else self.message


class InvalidRecipe(RecipeError):
    """Every problem of one recipe at once; `problems` has them apart."""

    def __init__(self, problems: Sequence[Problem], where: str | Path) -> None:
        self.problems = tuple(problems)
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__("\n".join([count, *(f"  {problem}" for problem in self.problems)]), where=where)


def dotted(path: KeyPath) -> str:
    """The path as overrides write it: `data.prompts.0.limit`."""
    return ".".join(str(key) for key in path)


def show(value: Any, limit: int = 60) -> str:
    """A value as the recipe would write it, shortened for a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be, or None."""
    by_form = {_plain(name): name for name in known}
    matches = difflib.get_close_matches(_plain(word), by_form, n=1, cutoff=0.6)
    return by_form[matches[0]] if matches else None


def _plain(word: str) -> str:
    return word.casefold().replace("-", "_")
