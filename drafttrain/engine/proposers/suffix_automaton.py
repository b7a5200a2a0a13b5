"""Every substring of what was read, with how often it occurred and what followed it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """The longest suffix of a text that an automaton holds: its state, and its length in tokens."""

    state: int
    length: int


NOTHING = Match(0, 0)


class SuffixAutomaton:
    """The smallest automaton of all substrings of some sequences, built token by token.

    At most two states a token. A state stands for substrings that end at the same places; its suffix link leads to
    the longest suffix of theirs that occurs elsewhere too.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._latest = [0]
        self._last = 0
        self.tokens = 0
        """Tokens read."""

    def start(self) -> None:
        """What is read from here on does not continue what was read before."""
        self._last = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Read on."""
        for token in tokens:
            self._last = state = self._step(token)
            self.tokens += 1
            while state > 0:
                self._count[state] += 1
                self._latest[state] = self.tokens
                state = self._link[state]

    def repeated(self) -> Match:
        """The longest suffix of what was read that occurred before."""
        state = self._last if self._count[self._last] > 1 else max(self._link[self._last], 0)
        return Match(state, self._length[state])

    def follow(self, match: Match, token: int) -> Match:
        """The longest suffix when the text goes on with a token that is not read in."""
        state, length = self._current(match)
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        state = self._next[state].get(token, 0)
        return Match(state, length + 1) if state else NOTHING

    def continuation(self, match: Match, count: int, least: float = 0.0) -> tuple[list[int], list[float]]:
        """What followed most often, token by token; the latest of those that followed equally often.

        Args:
            match: where to go on from.
            count: most tokens.
            least: where the chance of the whole path falls below it, the path ends.

        Returns:
            (tokens, chances): the share of occurrences that went along the path so far.
        """
        state = self._current(match).state
        tokens: list[int] = []
        chances: list[float] = []
        chance = 1.0
        while len(tokens) < count:
            while state and not self._next[state]:
                # The end of what was read: a text in a loop goes on as its shorter suffixes did.
                state = self._link[state]
            if not state:
                break
            best, total = 0, 0
            token = -1
            for candidate, after in self._next[state].items():
                total += self._count[after]
                if (self._count[after], self._latest[after]) > (self._count[best], self._latest[best]):
                    best, token = after, candidate
            chance *= self._count[best] / total
            if chance < least:
                break
            tokens.append(token)
            chances.append(chance)
            state = best
        return tokens, chances

    def _current(self, match: Match) -> Match:
        """A match made before the automaton read on: its state may have been split since."""
        state = match.state
        while state and match.length <= self._length[self._link[state]]:
            state = self._link[state]
        return Match(state, match.length)

    def _step(self, token: int) -> int:
        last = self._last
        known = self._next[last].get(token)
        if known is not None:
            return known if self._length[known] == self._length[last] + 1 else self._split(last, token, known)
        new = self._add(self._length[last] + 1, {}, 0)
        state = last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            after = self._next[state][token]
            whole = self._length[after] == self._length[state] + 1
            self._link[new] = after if whole else self._split(state, token, after)
        return new

    def _split(self, state: int, token: int, after: int) -> int:
        """The shorter substrings of `after`, those that `state` leads to, become a state of their own."""
        clone = self._add(self._length[state] + 1, dict(self._next[after]), self._link[after])
        self._count[clone], self._latest[clone] = self._count[after], self._latest[after]
        self._link[after] = clone
        while state >= 0 and self._next[state].get(token) == after:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _add(self, length: int, following: dict[int, int], link: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._count.append(0)
        self._latest.append(0)
        return len(self._next) - 1
