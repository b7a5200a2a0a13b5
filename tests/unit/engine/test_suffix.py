"""Suffix drafts: the automaton against plain search, what is remembered, what is forgotten."""

from __future__ import annotations

import random

import pytest

from drafttrain.engine.proposers import Row, SuffixProposer
from drafttrain.engine.proposers.suffix_automaton import NOTHING, SuffixAutomaton
from drafttrain.engine.records import Request
from drafttrain.errors import EngineError


def _row(tokens: list[int], prompt: int = 1, name: str = "a") -> Row:
    return Row(Request(name, tokens[:prompt], 99), tokens, 99, None)


@pytest.mark.parametrize("seed", range(40))
def test_the_automaton_counts_as_plain_search_does(seed: int) -> None:
    chance = random.Random(seed)
    letters = chance.choice((2, 3, 5))
    automaton, texts = SuffixAutomaton(), []
    for _ in range(chance.randint(1, 4)):
        texts.append([chance.randrange(letters) for _ in range(chance.randint(1, 20))])
        automaton.start()
        automaton.extend(texts[-1])

    def count(part: list[int]) -> int:
        return sum(t[i : i + len(part)] == part for t in texts for i in range(len(t) - len(part) + 1))

    query = [chance.randrange(letters + 1) for _ in range(25)]
    match = NOTHING
    for end in range(1, len(query) + 1):
        match = automaton.follow(match, query[end - 1])
        longest = max(n for n in range(end + 1) if n == 0 or count(query[end - n : end]))
        assert match.length == longest
        found = query[end - longest : end]
        following = [count([*found, letter]) for letter in range(letters)]
        if longest and any(following):
            tokens, chances = automaton.continuation(match, 1)
            assert following[tokens[0]] == max(following)
            assert chances[0] == pytest.approx(max(following) / sum(following))
    last = texts[-1]
    assert automaton.repeated().length == max(n for n in range(len(last) + 1) if n == 0 or count(last[-n:]) > 1)


def test_a_match_survives_what_is_read_behind_it() -> None:
    """Reading splits states; a match made before still stands for its own text."""
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3, 4])
    match = NOTHING
    for token in (2, 3):
        match = automaton.follow(match, token)
    automaton.start()
    automaton.extend([9, 3, 5, 9, 3, 5])
    # "2 3" was followed by 4 alone; "3" was followed by 5 more often.
    assert automaton.continuation(match, 1)[0] == [4]
    assert automaton.continuation(automaton.follow(NOTHING, 3), 1)[0] == [5]


def test_the_most_frequent_continuation_then_the_latest() -> None:
    proposer = SuffixProposer()
    assert proposer.find(_row([1, 2, 5, 1, 2, 6, 1, 2, 6, 1, 2, 5, 1, 2, 6, 0, 1, 2]), 1).tokens == [6]
    assert proposer.find(_row([1, 2, 5, 1, 2, 6, 1, 2], name="b"), 1).tokens == [6]
    assert proposer.find(_row([1, 2, 3], name="c"), 4) == ([], 0)


def test_a_text_in_a_loop_goes_on_looping() -> None:
    found = SuffixProposer().find(_row([4, 7, 8, 7, 8, 7, 8]), 6)
    assert found.tokens == [7, 8, 7, 8, 7, 8] and found.match == 4


def test_past_outputs_are_found_and_prompts_are_not() -> None:
    proposer = SuffixProposer()
    first = _row([10, 11, 12, 13, 14, 15], prompt=3)
    assert not proposer.look_up([first], 4)[0].tokens
    first.tokens.append(16)
    # It has left: its output 13 14 15 16 can be copied, its prompt cannot.
    second = _row([1, 13, 14], name="b")
    assert proposer.look_up([second], 4)[0] == ([15, 16], 2)
    assert not proposer.look_up([_row([1, 11, 12], name="c")], 4)[0].tokens
    proposer.forget()
    assert not proposer.look_up([second], 4)[0].tokens


def test_memory_is_bounded_and_the_older_half_goes() -> None:
    proposer = SuffixProposer(memory=40)
    for number in range(12):
        text = [1000 * number + i for i in range(10)]
        proposer.look_up([_row([0, *text], name=str(number))], 2)
    proposer.look_up([], 2)
    assert proposer._past.tokens <= 40
    assert not proposer.find(_row([5, 0, 1], name="old"), 2).tokens
    assert proposer.find(_row([5, 11_000, 11_001], name="new"), 2).tokens == [11_002, 11_003]
    assert proposer.memory_bytes() <= proposer.bytes_needed(2, 3)


def test_drafts_of_a_stage_above_are_followed_and_not_learnt() -> None:
    proposer = SuffixProposer()
    text = [1, 2, 3, 1, 2, 4, 9]
    row = _row(text)
    view = Row(row.request, [*text, 1, 2], 99, None, drafted=2)
    assert proposer.find(view, 1).tokens[0] in (3, 4)
    assert proposer._texts["a", 0].read == len(text)
    assert not proposer.find(row, 3).tokens


def test_bad_options() -> None:
    for options in ({"memory": -1}, {"shortest": 0}, {"factor": 0}):
        with pytest.raises(EngineError, match="suffix draft"):
            SuffixProposer(**options)
