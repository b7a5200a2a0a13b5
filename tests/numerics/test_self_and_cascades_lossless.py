"""Self-speculation and cascades: greedy output equals plain output token for token, sampled output does not depend on
the batch (cases 29 and 32 of docs/cases.md)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.lm.model import DraftLM
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import (
    CascadeProposer,
    EarlyExit,
    ModelReader,
    NGramProposer,
    Proposer,
    ReaderProposer,
    RouterProposer,
    SkippedLayers,
    SuffixProposer,
    build_proposer,
)
from drafttrain.engine.records import Request
from drafttrain.engine.sampling import SamplingParams
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.course import Course
from drafttrain.modeling.taps import Tap
from tests.draft_support import new_draft
from tests.support import RAGGED_PROMPTS, tiny_target

FEW = 12
"""With few tokens to choose from a random target repeats itself, so lookups find something."""
PROMPTS = [[token % FEW for token in prompt] for prompt in RAGGED_PROMPTS]


@cache
def _target(kind: str = "llama") -> CausalLM:
    return tiny_target(kind, vocab_size=FEW)


def _lm(target: CausalLM, *layers: int) -> ModelReader:
    draft = new_draft(DraftLMConfig(layers=layers), target)
    assert isinstance(draft, DraftLM)
    draft.prepare_for_inference()
    return ModelReader(draft.lm, f"lm {layers}")


def _lookup() -> SuffixProposer:
    return SuffixProposer(memory=0)


MAKERS: dict[str, Callable[[CausalLM], Proposer]] = {
    "exit": lambda t: ReaderProposer(EarlyExit(t, 3)),
    "exit-static": lambda t: ReaderProposer(EarlyExit(t, 2), tree=TreeShape.from_branching((3, 2))),
    "exit-dynamic": lambda t: ReaderProposer(EarlyExit(t, 2), tree=DynamicTree(3, 3, 5)),
    "skip": lambda t: ReaderProposer(SkippedLayers(t, [1, 2], [2])),
    "skip-static": lambda t: ReaderProposer(SkippedLayers(t, [1], [1]), tree=TreeShape.from_branching((2, 2))),
    "ngram > lm": lambda t: CascadeProposer(_lm(t, 0, 1, 3), NGramProposer(shortest=1)),
    "suffix > exit": lambda t: CascadeProposer(EarlyExit(t, 3), _lookup()),
    "suffix > exit > exit": lambda t: CascadeProposer(EarlyExit(t, 3), CascadeProposer(EarlyExit(t, 2), _lookup())),
    "suffix > lm > lm": lambda t: CascadeProposer(_lm(t, 0, 1, 3), CascadeProposer(_lm(t, 3), _lookup())),
    "exit > lm": lambda t: CascadeProposer(_lm(t, 0, 1, 2), ReaderProposer(EarlyExit(t, 1))),
    "lm > skip": lambda t: CascadeProposer(SkippedLayers(t, [2], [2]), ReaderProposer(_lm(t, 0, 3))),
    "suffix or exit": lambda t: RouterProposer(_lookup(), ReaderProposer(EarlyExit(t, 3)), longest=6),
    "suffix or (ngram > lm)": lambda t: RouterProposer(
        _lookup(), CascadeProposer(_lm(t, 0, 3), NGramProposer(shortest=1)), longest=6
    ),
}


def _requests(count: int, params: SamplingParams | None = None) -> list[Request]:
    params = params or SamplingParams()
    return [Request(str(i), prompt, count + i % 3, params) for i, prompt in enumerate(PROMPTS)]


@cache
def _alone(kind: str, index: int, count: int, params: SamplingParams) -> list[int]:
    request = Request(str(index), PROMPTS[index], count, params)
    return Engine(_target(kind), max_length=64).generate([request])[0].tokens


def _plain(requests: list[Request], kind: str = "llama") -> list[list[int]]:
    return [_alone(kind, int(r.id), r.max_new_tokens, r.sampling) for r in requests]


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("name", MAKERS)
def test_output_equals_plain(name: str, batch: int) -> None:
    requests = _requests(18)[: batch + 1]
    target = _target()
    engine = Engine(target, MAKERS[name](target), k=4, max_batch=batch, max_length=64)
    assert [c.tokens for c in engine.generate(requests)] == _plain(requests)
    assert any(r.accepted for r in engine.records)


@pytest.mark.parametrize("name", ["exit", "skip", "suffix > exit"])
@pytest.mark.parametrize("kind", ["gemma2", "qwen3", "phi", "cohere", "mistral-window"])
def test_architectures(kind: str, name: str) -> None:
    requests, target = _requests(10)[:3], _target(kind)
    engine = Engine(target, MAKERS[name](target), k=3, max_batch=3, max_length=64)
    assert [c.tokens for c in engine.generate(requests)] == _plain(requests, kind)


@pytest.mark.parametrize("name", ["exit", "skip-static", "suffix > exit > exit", "suffix > lm > lm", "suffix or exit"])
def test_sampled_rows_do_not_depend_on_the_batch(name: str) -> None:
    target, requests = _target(), _requests(10, SamplingParams(temperature=0.8, top_p=0.9, seed=4))
    requests[1] = Request("1", PROMPTS[1], 9)

    def run(some: list[Request], batch: int) -> list[list[int]]:
        engine = Engine(target, MAKERS[name](target), k=3, max_batch=batch, max_length=64)
        return [c.tokens for c in engine.generate(some)]

    assert run(requests, 7) == [run([request], 1)[0] for request in requests]


@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (0, 3)])
def test_a_cascade_writes_what_its_draft_writes(layers: tuple[int, ...]) -> None:
    """Its stages check exactly, so the target sees the very proposals that the draft alone would make."""
    target, requests = _target(), _requests(16)
    alone = Engine(target, ReaderProposer(_lm(target, *layers)), k=4, max_batch=3, max_length=64)
    staged = Engine(target, CascadeProposer(_lm(target, *layers), _lookup()), k=4, max_batch=3, max_length=64)
    assert alone.generate(requests) == staged.generate(requests)
    assert [(r.request, r.proposed, r.accepted) for r in alone.records] == [
        (r.request, r.proposed, r.accepted) for r in staged.records
    ]


def test_the_verification_goes_on_from_the_exit() -> None:
    """Blocks below the exit run once for each draft token, in the draft alone."""
    target = _target()
    runs = [0] * target.n_layers
    handles = [
        block.register_forward_hook(lambda *_, i=i: runs.__setitem__(i, runs[i] + 1))
        for i, block in enumerate(target.layers)
    ]
    engine = Engine(target, ReaderProposer(EarlyExit(target, 3)), k=4, max_length=64)
    engine.generate([Request("a", PROMPTS[0], 2), Request("b", PROMPTS[3], 18)])
    for handle in handles:
        handle.remove()
    # A prefill each; a round without room for drafts is a plain forward.
    drafted = sum(r.proposed > 0 for r in engine.records)
    plain = len(engine.records) - drafted
    asked = sum(r.proposed + 1 for r in engine.records if r.proposed)
    assert runs[3] == 2 + drafted + plain
    assert runs[0] == runs[2] == 2 + plain + asked


def test_courses_share_weights_and_leave_the_body_alone() -> None:
    target = _target()
    ids = torch.tensor([PROMPTS[2]])
    with torch.no_grad():
        whole = target(ids, taps=(Tap.block(2),))
        states = whole.taps[Tap.block(2)]
        assert torch.equal(target(ids, course=Course(first=2), states=states).final, whole.final)
        half = target(ids, course=Course(end=2), taps=(Tap.pre_norm,))
        assert torch.equal(half.taps[Tap.pre_norm], states)
        assert torch.equal(half.final, target.final_norm(states))
        block = target.layers[3]
        last = target(ids, taps=(Tap.block(3), Tap.pre_norm)).taps
        thin = target(ids, course=Course(no_attention=frozenset({3})), taps=(Tap.pre_norm,)).taps[Tap.pre_norm]
        by_hand = last[Tap.block(3)] + block.mlp(block.post_attention_layernorm(last[Tap.block(3)]))
        torch.testing.assert_close(thin, by_hand)
        assert torch.equal(target(ids).final, whole.final)


def test_bad_stages() -> None:
    target = _target()
    for blocks in (0, 4):
        with pytest.raises(EngineError, match=f"exit after {blocks} blocks of a target with 4"):
            EarlyExit(target, blocks)
    with pytest.raises(EngineError, match="block 4 is to be left out of a target with 4 blocks"):
        SkippedLayers(target, [4], [])
    with pytest.raises(EngineError, match="nothing is to be left out"):
        SkippedLayers(target, [], [])
    inner = CascadeProposer(EarlyExit(target, 2), _lookup())
    with pytest.raises(EngineError, match="contains itself: early exit 2"):
        CascadeProposer(EarlyExit(target, 2), inner)
    tree = ReaderProposer(EarlyExit(target, 1), tree=TreeShape.from_branching((2,)))
    with pytest.raises(EngineError, match="proposes trees"):
        CascadeProposer(EarlyExit(target, 2), tree)
    eagle = build_proposer(new_draft(Eagle3Config(), target))
    with pytest.raises(EngineError, match="reads the target's features"):
        CascadeProposer(EarlyExit(target, 2), eagle)
    with pytest.raises(EngineError, match="part of another target"):
        Engine(tiny_target(seed=1), ReaderProposer(EarlyExit(target, 2)))
