from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from drafttrain.bench.prompts import EvalPrompt
from drafttrain.bench.runner import Contender, rotated, run_suite, settings
from drafttrain.bench.suite import SuiteConfig
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.engine.proposers import NGramProposer, Proposer, Row, build_proposer
from drafttrain.engine.tree import TreeShape
from drafttrain.engine.verify import Proposal
from drafttrain.errors import DataError
from drafttrain.targets.identity import TargetIdentity
from drafttrain.targets.model import TargetModel
from tests.chats import CHATML, chat_tokenizer
from tests.draft_support import new_draft
from tests.support import tiny_hf

PROMPTS = [EvalPrompt("a", "x", ("one", "two", "three")), EvalPrompt("b", "y", ("four",)), EvalPrompt("c", "x", ("5",))]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    tokenizer = chat_tokenizer(CHATML)
    hf = tiny_hf(vocab_size=len(tokenizer), max_position_embeddings=512, eos_token_id=tokenizer.eos_token_id)
    return TargetModel(hf, tokenizer, TargetIdentity("tiny", "", "", "", len(tokenizer), len(tokenizer), 32, 4))


def suite(**changes: Any) -> SuiteConfig:
    values = {"name": "s", "prompts": "p", "max_new_tokens": 6, "temperatures": [0.0], "bootstrap": 100, "k": [2]}
    return SuiteConfig(**{**values, **changes})


class Wilful(Proposer):
    """Always proposes the same token, and notes which prompts it was asked about."""

    name = "wilful"

    def __init__(self) -> None:
        self.prompts: set[tuple[int, tuple[int, ...]]] = set()

    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        self.prompts |= {(row.request.turn, tuple(row.request.prompt_ids)) for row in rows}
        return Proposal(torch.full((len(rows), k), 7), torch.full((len(rows),), k))


def test_everyone_starts_once_and_learners_follow_the_baseline() -> None:
    names = ["none", "run", "ngram", "oracle"]
    orders = [rotated(names, by, frozenset({"oracle"})) for by in range(4)]
    assert {order[0] for order in orders} == {"none", "run", "ngram"}
    assert all(order.index("oracle") > order.index("none") for order in orders)
    assert all(sorted(order) == sorted(names) for order in orders)


def test_settings_are_every_combination() -> None:
    found = settings(suite(k=[2, 4], temperatures=[0.0, 1.0], batch=[1, 8]))
    assert len(set(found)) == 8 and found[0].temperature == 0.0


def test_histories_hold_the_answers_of_the_baseline(target: TargetModel) -> None:
    """Two drafts, one of them always wrong, get the same prompts in every turn, sampled or not."""
    one, other = Wilful(), Wilful()
    contenders = [Contender("one", "x", one), Contender("other", "x", other)]
    run = run_suite(target, suite(temperatures=[1.0]), PROMPTS, contenders)
    assert one.prompts == other.prompts
    assert {turn for turn, _ in one.prompts} == {0, 1, 2}
    assert all(entry.answers == 5 for entry in run.drafts)


def test_a_wilfully_bad_draft_changes_nothing_and_is_worth_nothing(target: TargetModel) -> None:
    run = run_suite(target, suite(), PROMPTS, [Contender("bad", "x", Wilful())])
    plain, bad = run.drafts
    assert bad.exact is not None and bad.exact.rate == 1.0
    assert bad.tokens == plain.tokens
    assert plain.acceptance.tau == 1.0 and bad.acceptance.tau is not None and bad.acceptance.tau < 1.3
    assert list(bad.categories) == ["x", "y"]


def test_repeats_pool_rounds_and_leave_requests_alone(target: TargetModel) -> None:
    once = run_suite(target, suite(), PROMPTS, [])
    twice = run_suite(target, suite(repeats=2), PROMPTS, [])
    assert twice.drafts[0].acceptance.rounds == 2 * once.drafts[0].acceptance.rounds
    assert twice.drafts[0].requests == once.drafts[0].requests == 3


def test_each_repeat_of_a_sampled_conversation_has_prompts_of_its_own(target: TargetModel) -> None:
    wilful = Wilful()
    run = run_suite(target, suite(temperatures=[1.0], repeats=2), PROMPTS, [Contender("one", "x", wilful)])
    lengths = {turn: [len(ids) for t, ids in wilful.prompts if t == turn] for turn in range(3)}
    assert len(lengths[1]) == len(lengths[2]) == 2  # other answers went before
    drafted = run.drafts[1]
    assert drafted.prompt_tokens == 2 * sum(lengths[0]) + sum(lengths[1]) + sum(lengths[2])
    assert sum(bucket.answers for bucket in drafted.by_prompt) == drafted.prefills == 10


def test_one_new_token_leaves_nothing_to_measure(target: TargetModel) -> None:
    """The prefill gives the only token: no round, no tau, no speed-up, no crash."""
    run = run_suite(target, suite(max_new_tokens=1), PROMPTS, [Contender("n", "ngram", NGramProposer())])
    for entry in run.drafts:
        assert entry.tokens == 5
        assert entry.acceptance.tau is None and entry.speed is None and entry.split is None


def test_texts_are_spread_over_categories_and_name_their_writers(target: TargetModel) -> None:
    run = run_suite(target, suite(texts=2), PROMPTS, [Contender("n", "ngram", NGramProposer())])
    assert [(text.request, text.turn) for text in run.texts] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert all(0 <= writer <= 2 for text in run.texts for _, writer in text.pieces)


def test_names_must_differ_and_prompts_exist(target: TargetModel) -> None:
    twin = [Contender("n", "ngram", NGramProposer()), Contender("n", "ngram", NGramProposer())]
    with pytest.raises(DataError, match="names of their own"):
        run_suite(target, suite(), PROMPTS, twin)
    with pytest.raises(DataError, match="no prompts"):
        run_suite(target, suite(), [], [])


def test_a_tree_is_measured_once_beside_every_k(target: TargetModel) -> None:
    draft = new_draft(DraftLMConfig(layers=(0, 3)), target)
    tree = build_proposer(draft, "d 2x2", TreeShape.from_branching((2, 2)))
    contenders = [Contender("d", "draft_lm", build_proposer(draft)), Contender("d 2x2", "draft_lm", tree)]
    run = run_suite(target, suite(k=[2, 3]), PROMPTS, contenders)
    assert [(entry.draft, entry.setting.k) for entry in run.drafts] == [
        ("none", 2), ("d", 2), ("d 2x2", 2), ("none", 3), ("d", 3),
    ]  # fmt: skip
    found = next(entry for entry in run.drafts if entry.draft == "d 2x2")
    assert found.exact is not None and found.exact.rate == 1.0
    assert len(found.acceptance.per_position) == 2
