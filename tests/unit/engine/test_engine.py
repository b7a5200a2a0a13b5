"""Limits, batches, records and errors of the engine (cases 32 and 34 of docs/cases.md)."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.build import build_drafter, init_from_target, new_vocab_map
from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.engine.engine import Engine
from drafttrain.engine.generation import TargetGenerator
from drafttrain.engine.proposers import NGramProposer, OracleProposer, Proposer, Row, build_proposer
from drafttrain.engine.proposers.lookup import Lookup
from drafttrain.engine.records import Request
from drafttrain.engine.sampling import SamplingParams
from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM
from tests.support import RAGGED_PROMPTS, VOCAB, tiny_target


def _eagle(target: CausalLM) -> Proposer:
    config = Eagle3Config(family="eagle3", draft_vocab_size=40)
    torch.manual_seed(0)
    drafter = build_drafter(config, target.config, new_vocab_map(config, VOCAB, torch.ones(VOCAB)))
    init_from_target(drafter, target)
    return build_proposer(drafter)


def test_one_token_prompt() -> None:
    (done,) = Engine(tiny_target(), max_length=32).generate([Request("a", [4], 5)])
    assert len(done.tokens) == 5 and done.reason == "length"


def test_zero_new_tokens() -> None:
    engine = Engine(tiny_target(), max_length=32)
    done = engine.generate([Request("a", [4, 5], 0), Request("b", [4, 5], 1)])
    assert [c.tokens == [] for c in done] == [True, False]
    assert done[1].reason == "length" and not engine.records


def test_k_larger_than_the_room_left() -> None:
    target = tiny_target()
    plain = Engine(target, max_length=40).generate([Request("a", [4, 5], 3)])
    engine = Engine(target, OracleProposer({"a": plain[0].tokens}), k=16, max_length=40)
    assert engine.generate([Request("a", [4, 5], 3)])[0].tokens == plain[0].tokens
    assert [(r.proposed, r.emitted) for r in engine.records] == [(1, 2)]


def test_output_stops_at_the_context() -> None:
    target = tiny_target()
    prompt = list(range(3, 3 + 40)) * 3
    assert len(prompt) == 120
    for proposer in (None, NGramProposer(), _eagle(target)):
        (done,) = Engine(target, proposer, k=4, max_length=4096).generate([Request("a", prompt, 50)])
        assert done.reason == "context" and len(done.tokens) == 8


def test_prompt_as_long_as_the_context() -> None:
    with pytest.raises(EngineError, match="128 tokens leaves no room in 128"):
        Engine(tiny_target(), max_length=4096).generate([Request("a", [5] * 128, 1)])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("a", [], 4), "empty prompt"),
        (Request("a", [VOCAB], 4), f"token id {VOCAB} is outside the target's vocabulary of {VOCAB}"),
        (Request("a", [5, -1, 7], 4), "token id -1 is outside"),
        (Request("a", [3], -1), "max_new_tokens is -1"),
    ],
)
def test_bad_requests(request_: Request, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Engine(tiny_target(), max_length=32).generate([request_])


def test_request_ids_are_unique() -> None:
    with pytest.raises(EngineError, match="not unique"):
        Engine(tiny_target(), max_length=32).generate([Request("a", [3], 4), Request("a", [4], 4)])


def test_bad_sampling() -> None:
    for wrong in (
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e-45},
        {"temperature": 1e-38},
        {"temperature": 9e-6},
    ):
        with pytest.raises(EngineError):
            SamplingParams(**wrong)


def test_an_engine_is_usable_after_an_error() -> None:
    engine = Engine(tiny_target(), max_batch=2, max_length=32)
    with pytest.raises(EngineError):
        engine.generate([Request("a", [4, 5], 9), Request("b", [], 3)])
    assert len(engine.generate([Request("a", [4, 5], 9)])[0].tokens) == 9


def test_sampled_rows_do_not_depend_on_the_batch() -> None:
    """fp32: each ragged row equals its run alone, sampling included, whether it is there from the start or joins."""
    target = tiny_target()
    params = SamplingParams(temperature=0.9, top_p=0.9, seed=11)
    requests = [Request(str(i), p, 20, params) for i, p in enumerate(RAGGED_PROMPTS)]
    for make in (lambda: None, NGramProposer, lambda: _eagle(target)):
        alone = [Engine(target, make(), k=3, max_length=64).generate([r])[0] for r in requests]
        for width in (7, 3):
            together = Engine(target, make(), k=3, max_batch=width, max_length=64).generate(requests)
            assert [c.tokens for c in together] == [c.tokens for c in alone]


def test_requests_join_and_leave() -> None:
    """More requests than rows, different lengths and limits: each as if alone."""
    target = tiny_target()
    requests = [
        Request(f"{i}-{n}", prompt, 1 + (i * 7 + n * 3) % 23)
        for n in range(3)
        for i, prompt in enumerate(RAGGED_PROMPTS)
    ]
    engine = Engine(target, _eagle(target), k=3, max_batch=4, max_length=64)
    together = engine.generate(requests)
    alone = [Engine(target, max_length=64).generate([r])[0] for r in requests]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    assert not engine.rows and not engine.cache.lengths.any()


def test_a_row_at_its_end_rides_along_with_wider_rounds() -> None:
    """The cache is as long as the longest request: nothing may be written past it."""
    target = tiny_target()
    requests = [Request("short", [5] * 20, 6), Request("long", [3, 4], 24)]
    plain = Engine(target, max_length=26).generate(requests)
    oracle = OracleProposer({c.id: c.tokens for c in plain})
    for proposer in (oracle, _eagle(target)):
        drafted = Engine(target, proposer, k=8, max_batch=2, max_length=26).generate(requests)
        assert [c.tokens for c in drafted] == [c.tokens for c in plain]


def test_records_add_up() -> None:
    target = tiny_target()
    requests = [Request(str(i), p, 15, turn=i) for i, p in enumerate(RAGGED_PROMPTS)]
    engine = Engine(target, _eagle(target), k=3, max_batch=3, max_length=64)
    for done in engine.generate(requests):
        mine = [r for r in engine.records if r.request == done.id]
        assert [r.round for r in mine] == list(range(len(mine)))
        assert {r.turn for r in mine} == {int(done.id)}
        assert 1 + sum(r.emitted for r in mine) == len(done.tokens) == 15
        assert [r.reason for r in mine] == [None] * (len(mine) - 1) + ["length"]
        assert all(0 <= r.accepted <= r.proposed <= 3 and r.emitted == r.accepted + 1 for r in mine)
        assert sum(w > 0 for w in done.writers) == sum(r.accepted for r in mine)
    per_round = {(r.draft_s, r.verify_s, r.host_s) for r in engine.records}
    assert sum(map(sum, per_round)) == pytest.approx(engine.decode_s)


def test_without_a_draft_each_round_emits_one_token() -> None:
    engine = Engine(tiny_target(), max_length=64)
    engine.generate([Request("a", [4, 5], 12)])
    assert [(r.proposed, r.accepted, r.emitted) for r in engine.records] == [(0, 0, 1)] * 11


def test_generator_yields_every_prompt_once() -> None:
    target = tiny_target()
    prompts = RAGGED_PROMPTS * 2

    def outputs(batch_size: int) -> dict[int, list[int]]:
        found = TargetGenerator(target, batch_size).generate(prompts, max_new_tokens=6, temperature=1.0, seed=2)
        return {index: tokens for index, tokens, _ in found}

    got = outputs(4)
    assert sorted(got) == list(range(14)) and all(len(tokens) == 6 for tokens in got.values())
    assert got == outputs(2)
    # The same prompt at another place has a stream of its own.
    assert any(got[i] != got[i + 7] for i in range(7))


def test_oracle_without_a_recording() -> None:
    engine = Engine(tiny_target(), OracleProposer({}), max_length=32)
    with pytest.raises(EngineError, match="no recorded output for request a"):
        engine.generate([Request("a", [4], 4)])


def _found(proposer: Lookup, tokens: list[int], k: int) -> list[int]:
    return proposer.find(Row(Request("a", tokens, 9), tokens, 9, None), k).tokens


def test_ngram_proposes_what_followed() -> None:
    proposer = NGramProposer(longest=3, shortest=1)
    assert _found(proposer, [7, 1, 2, 3, 9, 8, 1, 2, 3], 2) == [9, 8]
    assert _found(proposer, [5, 6, 5, 7, 5], 3) == [7, 5]
    assert _found(proposer, [1, 2, 3], 3) == []
