"""The parser of a command: argparse, and `key=value` overrides wherever they stand."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any


def is_override(word: str) -> bool:
    """Whether a word of a command line is `a.b.0=value`; what has a slash before its "=" is a path."""
    return re.match(r"\w[^/=]*=", word) is not None


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps prose to the terminal, and leaves alone what has lines of its own: examples and lists."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = (
            super()._fill_text if "\n" in text.strip() else super(argparse.RawDescriptionHelpFormatter, self)._fill_text
        )
        return fill(text, width, indent)


class CommandParser(argparse.ArgumentParser):
    """Puts the overrides of a command that has an argument of that name behind its other words.

    argparse takes the first words for the recipe, and ends a list of words at the first option.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"formatter_class": _HelpFormatter, **kwargs})

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """See `argparse.ArgumentParser`; also called for each command by the parser above it."""
        words = list(sys.argv[1:] if args is None else args)
        if not any(action.dest == "overrides" for action in self._actions):
            return super().parse_known_args(words, namespace)
        kept, overrides = self._sort(words)
        parsed, behind = super().parse_known_args(kept, namespace)
        parsed.overrides = [*parsed.overrides, *overrides]
        return parsed, behind

    def _sort(self, words: list[str]) -> tuple[list[str], list[str]]:
        """The words without the overrides, and these. What stands behind an option that takes a value is its value."""
        end = words.index("--") if "--" in words else len(words)
        kept: list[str] = []
        overrides: list[str] = []
        before = ""
        for word in words[:end]:
            (overrides if is_override(word) and not self._wants_value(before) else kept).append(word)
            before = word
        return kept + words[end:], overrides

    def _wants_value(self, word: str) -> bool:
        if not word.startswith("-") or "=" in word:  # --option=value has its value
            return False
        options = self._option_string_actions
        # argparse takes the beginning of an option for it.
        meant = [options[word]] if word in options else [options[name] for name in options if name.startswith(word)]
        return any(action.nargs != 0 for action in meant)
