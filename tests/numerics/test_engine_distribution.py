"""Whole rounds of staged, shared and mixed drafts sample the target's distribution: chi-square on 16 tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import (
    CascadeProposer,
    EarlyExit,
    Proposer,
    ReaderProposer,
    RouterProposer,
    SkippedLayers,
    SuffixProposer,
    build_proposer,
)
from drafttrain.engine.records import Request
from drafttrain.engine.sampling import SamplingParams, Typical, probabilities
from drafttrain.engine.tree import TreeShape
from drafttrain.modeling.causal_lm import CausalLM
from tests.draft_support import new_draft
from tests.numerics.chi_square import VOCAB, chi_square, critical
from tests.support import tiny_target

ROWS = 3000
PROMPT = [3, 7, 3, 7, 9, 3, 7, 3]
PLACES = 4

MAKERS: dict[str, Callable[[CausalLM], Proposer]] = {
    "exit": lambda t: ReaderProposer(EarlyExit(t, 1)),
    "exit-without-replacement": lambda t: ReaderProposer(
        EarlyExit(t, 1), tree=TreeShape.from_branching((3, 1)), sampled=True
    ),
    "suffix > exit > skip": lambda t: CascadeProposer(
        SkippedLayers(t, [1], [1]), CascadeProposer(EarlyExit(t, 1), SuffixProposer(memory=0))
    ),
    "exit > skip": lambda t: CascadeProposer(SkippedLayers(t, [1], []), ReaderProposer(EarlyExit(t, 1))),
    "suffix or eagle3": lambda t: RouterProposer(
        SuffixProposer(memory=0), build_proposer(new_draft(Eagle3Config(taps=(0, 1, "pre_norm")), t, 1)), longest=3
    ),
}
PARAMS = {
    "temperature": SamplingParams(temperature=1.4, seed=1),
    "min_p": SamplingParams(temperature=1.6, min_p=0.1, top_p=0.97, seed=2),
    "penalty": SamplingParams(temperature=1.2, repetition_penalty=1.5, seed=3),
}


@cache
def _target() -> CausalLM:
    return tiny_target(
        vocab_size=VOCAB, num_hidden_layers=2, hidden_size=16, intermediate_size=16, initializer_range=0.3
    )


def _sample(proposer: Proposer | None, params: SamplingParams) -> tuple[Engine, torch.Tensor]:
    """Outputs int64 [ROWS, PLACES]."""
    engine = Engine(_target(), proposer, k=PLACES - 2, max_batch=ROWS, max_length=16)
    done = engine.generate([Request(str(row), PROMPT, PLACES, params) for row in range(ROWS)])
    return engine, torch.tensor([c.tokens for c in done])


def _following(before: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The target's distributions behind the prompt and some tokens [m, place], without engine or cache."""
    ids = torch.cat([torch.tensor([PROMPT]).expand(len(before), -1), before], 1)
    with torch.no_grad():
        logits = _target().lm_head(_target()(ids).final[:, -1])
    held = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, True)
    penalty = params.repetition_penalty
    logits = torch.where(held, torch.where(logits < 0, logits * penalty, logits / penalty), logits)
    return probabilities(logits, [params] * len(logits))


def _statistic(outputs: torch.Tensor, params: SamplingParams, place: int) -> tuple[float, int]:
    """Of the tokens at a place, against what is expected of them given the tokens before them."""
    expected = _following(outputs[:, :place], params).double().mean(0)
    return chi_square(outputs[:, place], expected)


@pytest.mark.parametrize(
    ("name", "params"),
    [(name, "temperature") for name in MAKERS]
    + [
        ("exit", "min_p"),
        ("exit", "penalty"),
        ("exit-without-replacement", "penalty"),
        ("suffix > exit > skip", "penalty"),
    ],
)
def test_outputs_follow_the_target(name: str, params: str) -> None:
    engine, outputs = _sample(MAKERS[name](_target()), PARAMS[params])
    assert 0 < sum(r.accepted for r in engine.records) < sum(r.levels for r in engine.records)
    for place in range(PLACES):
        statistic, freedom = _statistic(outputs, PARAMS[params], place)
        assert statistic < critical(freedom), f"place {place}: chi-square {statistic:.1f} at {freedom}"


@pytest.mark.parametrize("name", ["exit", "exit-without-replacement"])
def test_negative_control_typical_acceptance_fails(name: str) -> None:
    """It is lossy, and a test that it passed would prove nothing."""
    params = SamplingParams(temperature=1.4, seed=1, typical=Typical())
    assert params.lossy
    _, outputs = _sample(MAKERS[name](_target()), params)
    exact = SamplingParams(temperature=1.4, seed=1)
    worst = max(statistic / critical(freedom) for statistic, freedom in (_statistic(outputs, exact, p) for p in (1, 2)))
    assert worst > 1
