"""Lookups, and routers between a lookup and a draft: greedy output equals plain output token for token, in batches as
alone (cases 29 and 32 of docs/cases.md)."""

from __future__ import annotations

from functools import cache

import pytest

from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import NGramProposer, Proposer, RouterProposer, SuffixProposer, build_proposer
from drafttrain.engine.records import Completion, Request
from drafttrain.engine.sampling import SamplingParams
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.modeling.causal_lm import CausalLM
from tests.draft_support import new_draft
from tests.support import RAGGED_PROMPTS, tiny_target

CONFIGS: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(),
    "draft_lm": DraftLMConfig(layers=(0, 3)),
    "medusa": MedusaConfig(num_heads=3),
}
TREES: dict[str, TreeShape | DynamicTree | None] = {
    "chain": None,
    "static": TreeShape.from_branching((3, 2, 1)),
    "dynamic": DynamicTree(depth=3, top_k=3, nodes=8),
}
ROUTERS = [(draft, tree) for draft in CONFIGS for tree in TREES if (draft, tree) != ("medusa", "dynamic")]
# With few tokens to choose from a random target repeats itself often enough to be looked up.
FEW = 12
PROMPTS = [[token % FEW for token in prompt] for prompt in RAGGED_PROMPTS]


@cache
def _target() -> CausalLM:
    return tiny_target(vocab_size=FEW)


def _requests(count: int = 32, params: SamplingParams | None = None) -> list[Request]:
    params = params or SamplingParams()
    return [Request(str(i), prompt, count, params) for i, prompt in enumerate(PROMPTS)]


def _plain(requests: list[Request]) -> list[list[int]]:
    sampling = requests[0].sampling
    return [_alone(int(r.id), r.max_new_tokens, sampling) for r in requests]


@cache
def _alone(index: int, count: int, params: SamplingParams) -> list[int]:
    request = Request(str(index), PROMPTS[index], count, params)
    return Engine(_target(), max_length=96).generate([request])[0].tokens


def _router(draft: str, tree: str, min_match: int = 2) -> Proposer:
    proposer = build_proposer(new_draft(CONFIGS[draft], _target(), 1), tree=TREES[tree])
    return RouterProposer(SuffixProposer(), proposer, min_match, longest=6)


def _drafted(proposer: Proposer, requests: list[Request], batch: int) -> tuple[Engine, list[Completion]]:
    engine = Engine(_target(), proposer, k=3, max_batch=batch, max_length=96)
    return engine, engine.generate(requests)


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("name", ["ngram", "suffix"])
def test_lookups(name: str, batch: int) -> None:
    requests = _requests()[: batch + 1]
    proposer = NGramProposer(shortest=1) if name == "ngram" else SuffixProposer()
    engine, drafted = _drafted(proposer, requests, batch)
    assert [c.tokens for c in drafted] == _plain(requests)
    assert any(r.accepted for r in engine.records)


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(("draft", "tree"), ROUTERS)
def test_routers(draft: str, tree: str, batch: int) -> None:
    requests = _requests()[: batch + 1]
    engine, drafted = _drafted(_router(draft, tree), requests, batch)
    assert [c.tokens for c in drafted] == _plain(requests)
    # Both had their turn, and in a batch of seven beside each other.
    copied = [r for r in engine.records if r.levels > 3]
    assert copied and len(copied) < len(engine.records)
    for done in drafted:
        mine = [r for r in engine.records if r.request == done.id]
        assert 1 + sum(r.emitted for r in mine) == len(done.tokens) == len(done.writers)


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("proposer", ["ngram", "suffix", "eagle3-static", "router"])
def test_sampled_output_of_deterministic_drafts_is_plain_output(proposer: str, batch: int) -> None:
    """What decides about a place depends on the seed and the place alone, however the text is cut into rounds."""
    params = SamplingParams(temperature=0.3, top_p=0.95, seed=5)
    requests = _requests(24, params)[: batch + 1]
    make = {
        "ngram": lambda: NGramProposer(shortest=1),
        "suffix": SuffixProposer,
        "eagle3-static": lambda: build_proposer(new_draft(CONFIGS["eagle3"], _target(), 1), tree=TREES["static"]),
        "router": lambda: _router("eagle3", "dynamic"),
    }[proposer]
    _, drafted = _drafted(make(), requests, batch)
    assert [c.tokens for c in drafted] == _plain(requests)


@pytest.mark.parametrize("tree", ["chain", "static"])
def test_sampled_rows_of_a_router_do_not_depend_on_the_batch(tree: str) -> None:
    requests = _requests(20, SamplingParams(temperature=0.4, seed=3))
    requests[2] = Request("greedy", PROMPTS[2], 20)

    def run(some: list[Request], batch: int) -> list[list[int]]:
        proposer = build_proposer(
            new_draft(CONFIGS["eagle3"], _target(), 1), tree=TREES[tree], sampled=tree == "static"
        )
        router = RouterProposer(SuffixProposer(memory=0), proposer, longest=6)
        return [c.tokens for c in _drafted(router, some, batch)[1]]

    assert run(requests, 7) == [run([request], 1)[0] for request in requests]


def test_a_draft_that_waited_says_what_it_would_have_said() -> None:
    """EAGLE's state after rounds of another's tokens equals that of one that was told at once."""
    target, requests = _target(), _requests()
    recorded: dict[bool, list[tuple[int, int]]] = {}
    for lazy in (False, True):
        proposer = build_proposer(new_draft(CONFIGS["eagle3"], target, 1))
        router = RouterProposer(SuffixProposer(), proposer, longest=6)
        proposer.lazy = lazy
        engine, _ = _drafted(router, requests, 4)
        recorded[lazy] = [(r.proposed, r.accepted) for r in engine.records]
    assert recorded[False] == recorded[True]
