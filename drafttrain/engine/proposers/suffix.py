"""Repeat what followed the longest known suffix most often (SuffixDecoding, arXiv 2411.04975). Needs no model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from drafttrain.engine.proposers.base import Row
from drafttrain.engine.proposers.lookup import Found, Lookup
from drafttrain.engine.proposers.suffix_automaton import NOTHING, Match, SuffixAutomaton
from drafttrain.errors import EngineError

BYTES_A_TOKEN = 700
"""What an automaton takes for each token it has read, measured: two states with a dictionary of one entry."""


@dataclass
class _Text:
    """What is known of one row."""

    row: Row
    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    read: int = 0
    """Tokens that both automata have followed."""
    past: Match = NOTHING
    """In the past outputs as they were in this generation."""
    generation: int = -1


class SuffixProposer(Lookup):
    """Looks in the row's own prompt and output, and in the outputs of the engine's past requests.

    A longer match wins; of two equally long ones that whose continuation is likelier. Along the continuation the most
    frequent token is taken, the latest of equally frequent ones.

    Args:
        memory: tokens of past outputs that are kept; beyond, the older half is dropped. 0 = look at the row alone.
        shortest: fewest tokens that have to match.
        factor: tokens proposed for each token of the match, for what matches for long goes on for long.
        least: share of occurrences along the continuation below which it ends.
        name: as reports show it.
    """

    def __init__(
        self, memory: int = 65_536, shortest: int = 1, factor: int = 4, least: float = 0.1, name: str = "suffix"
    ) -> None:
        if memory < 0 or shortest < 1 or factor < 1:
            raise EngineError(
                f"a suffix draft with memory {memory}, shortest {shortest} and factor {factor}",
                remedy="memory is 0 or more, the others are at least 1",
            )
        self.memory, self.shortest, self.factor, self.least, self.name = memory, shortest, factor, least, name
        self._texts: dict[tuple[str, int], _Text] = {}
        self.forget()

    def forget(self) -> None:
        """Drop the past outputs."""
        self._past = SuffixAutomaton()
        self._outputs = deque[list[int]]()
        self._generation = 0
        self._texts.clear()

    def look_up(self, rows: Sequence[Row], k: int) -> list[Found]:
        """One for each row; rows that are no longer there have become past."""
        here = {(row.request.id, row.request.turn) for row in rows}
        for key in [key for key in self._texts if key not in here]:
            self._learn(self._texts.pop(key).row)
        return super().look_up(rows, k)

    def find(self, row: Row, k: int) -> Found:
        """The better of what the row itself and what past outputs say."""
        text = self._follow(row)
        own, past = text.own.repeated(), text.past
        # Drafts of a stage above are looked at, but not learnt.
        for token in row.tokens[text.read :]:
            own, past = text.own.follow(own, token), self._past.follow(past, token)
        best: tuple[int, float, list[int]] = (0, 0.0, [])
        for automaton, match in ((text.own, own), (self._past, past)):
            if match.length >= self.shortest:
                tokens, chances = automaton.continuation(match, min(k, self.factor * match.length), self.least)
                best = max(best, (match.length, sum(chances), tokens))
        return Found(best[2], best[0] if best[2] else 0)

    def _follow(self, row: Row) -> _Text:
        key = (row.request.id, row.request.turn)
        known = self._texts.get(key)
        if known is not None and known.row.request is not row.request:
            # Another request under an old id.
            self._learn(self._texts.pop(key).row)
            known = None
        text = self._texts.setdefault(key, _Text(row)) if known is None else known
        if not row.drafted:
            text.row = row
        if text.generation != self._generation:
            text.past, text.generation = NOTHING, self._generation
            for token in row.tokens[: text.read]:
                text.past = self._past.follow(text.past, token)
        new = row.tokens[text.read : len(row.tokens) - row.drafted]
        text.own.extend(new)
        for token in new:
            text.past = self._past.follow(text.past, token)
        text.read += len(new)
        return text

    def _learn(self, row: Row) -> None:
        output = row.tokens[len(row.request.prompt_ids) : len(row.tokens) - row.drafted]
        if not self.memory:
            return
        self._outputs.append(output[-self.memory :])
        self._read_past(self._outputs[-1])
        if self._past.tokens > self.memory:
            kept = sum(map(len, self._outputs))
            while self._outputs and kept > self.memory // 2:
                kept -= len(self._outputs.popleft())
            self._past = SuffixAutomaton()
            self._generation += 1
            for old in self._outputs:
                self._read_past(old)

    def _read_past(self, output: Sequence[int]) -> None:
        self._past.start()
        self._past.extend(output)

    def memory_bytes(self) -> int:
        """Automata, in bytes, by a measured size of a token."""
        return BYTES_A_TOKEN * (self._past.tokens + sum(text.own.tokens for text in self._texts.values()))

    def bytes_needed(self, rows: int, length: int) -> int:
        """The most it will come to hold."""
        return BYTES_A_TOKEN * (self.memory + rows * length)
