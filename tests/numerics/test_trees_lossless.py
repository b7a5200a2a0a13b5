"""Greedy output of trees equals plain greedy output token for token; a tree's logits equal plain ones on every path."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import Proposer, build_proposer
from drafttrain.engine.records import Completion, Request
from drafttrain.engine.sampling import SamplingParams
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.vocab_map import VocabMap
from tests.draft_support import new_draft
from tests.support import RAGGED_PROMPTS, VOCAB, tiny_target

CONFIGS: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(taps=(2, 2, 1)),
    "eagle3-small-vocabulary": Eagle3Config(taps=(2, 2, 1), draft_vocab_size=20),
    "eagle1": Eagle1Config(),
    "medusa": MedusaConfig(num_heads=3),
    "draft_lm": DraftLMConfig(layers=(0, 3)),
    "draft_lm-perfect": DraftLMConfig(layers=(0, 1, 2, 3)),
}
TREES: dict[str, TreeShape | DynamicTree] = {
    "static": TreeShape.from_branching((4, 2, 2)),
    "lopsided": TreeShape.from_parents((-1, 0, 1, -1, 3, 0, -1)),
    "dynamic": DynamicTree(depth=4, top_k=4, nodes=14),
}


def _proposer(name: str, target: CausalLM, tree: TreeShape | DynamicTree | None, sampled: bool = False) -> Proposer:
    config = CONFIGS[name]
    if name == "draft_lm-perfect":
        perfect = build_drafter(config, target.config, None)
        init_from_target(perfect, target)
        return build_proposer(perfect, tree=tree, sampled=sampled)
    small = VocabMap.from_ids(range(5, 25), VOCAB) if name.endswith("vocabulary") else None
    return build_proposer(new_draft(config, target, 1, small), tree=tree, sampled=sampled)


def _requests(
    count: int = 14, stop: frozenset[int] = frozenset(), params: SamplingParams | None = None
) -> list[Request]:
    params = params or SamplingParams()
    return [Request(str(i), prompt, count, params, stop) for i, prompt in enumerate(RAGGED_PROMPTS)]


@cache
def _target(kind: str) -> CausalLM:
    return tiny_target(kind)


@cache
def _plain_greedy(kind: str) -> list[Completion]:
    return _plain(_target(kind), _requests())


def _plain(target: CausalLM, requests: list[Request]) -> list[Completion]:
    engine = Engine(target, max_batch=1, max_length=64)
    return [engine.generate([request])[0] for request in requests]


def _drafted(
    target: CausalLM, proposer: Proposer, requests: list[Request], batch: int
) -> tuple[Engine, list[Completion]]:
    engine = Engine(target, proposer, max_batch=batch, max_length=64)
    return engine, engine.generate(requests)


CASES = [
    (kind, name, tree)
    for kind in ("llama", "gemma2", "qwen3")
    for name in CONFIGS
    for tree in TREES
    # Medusa heads have no dynamic tree. One architecture will do for the third shape.
    if not (name == "medusa" and tree == "dynamic") and (kind == "llama" or tree != "lopsided")
]


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(("kind", "name", "tree"), CASES)
def test_output_equals_plain(kind: str, name: str, tree: str, batch: int) -> None:
    target, requests, plain = _target(kind), _requests(), _plain_greedy(kind)
    if batch == 1:
        requests, plain = requests[:3], plain[:3]
    engine, drafted = _drafted(target, _proposer(name, target, TREES[tree]), requests, batch)
    assert [c.tokens for c in drafted] == [c.tokens for c in plain]
    assert any(r.accepted for r in engine.records)
    assert all(0 <= r.accepted <= r.levels <= TREES[tree].depth for r in engine.records)
    assert all(r.levels <= r.proposed <= TREES[tree].nodes for r in engine.records)
    if name == "draft_lm-perfect" and tree != "dynamic":
        # The best path is the target's own.
        assert all(r.accepted == r.levels for r in engine.records)
    for done in drafted:
        mine = [r for r in engine.records if r.request == done.id]
        assert 1 + sum(r.emitted for r in mine) == len(done.tokens) == len(done.writers)
        assert done.writers == [0] + [w for r in mine for w in [*range(1, r.accepted + 1), 0]]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "qwen3", "mistral-window"])
def test_logits_of_a_tree_equal_plain_logits_on_every_path(kind: str) -> None:
    """Teacher-forced, ragged rows, each with a tree of its own, deeper than the sliding window."""
    target = _target(kind)
    shapes = [
        TreeShape.from_parents((-1, -1, 0, 2, 3, 4, 5, 6, 1, 8)),
        TreeShape.from_branching((2, 2, 1)),
        TreeShape.from_parents((-1,) * 10),
    ]
    trees = [shape.on(torch.device("cpu"))[0] for shape in shapes]
    prompts, roots = [RAGGED_PROMPTS[i] for i in (0, 2, 5)], [7, 8, 9]
    tokens = torch.randint(3, VOCAB, (3, 11), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = torch.tensor(roots)
    cache = target.new_cache(3, 40)
    with torch.inference_mode():
        lengths = torch.tensor([len(p) for p in prompts])
        ids = torch.stack([torch.tensor(p + [0] * (13 - len(p))) for p in prompts])
        cache.begin(3, 13)
        target(ids, cache=cache)
        cache.commit(lengths)
        cache.begin(3, 11, torch.cat([tree.sees for tree in trees]))
        got = target.lm_head(target(tokens, cache=cache).final)
        for row, tree in enumerate(trees):
            for place in range(11):
                path = tokens[row, tree.sees[0, place].nonzero()[:, 0]].tolist()
                text = torch.tensor([prompts[row] + path])
                plain = target.lm_head(target(text).final[0, -1])
                torch.testing.assert_close(got[row, place], plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["draft_lm-perfect", "eagle3", "medusa"])
def test_a_stop_token_inside_an_accepted_path_ends_the_output_there(name: str) -> None:
    target, free = _target("llama"), _plain_greedy("llama")
    stop = frozenset({free[0].tokens[7], free[3].tokens[2]})
    requests = _requests(stop=stop)
    plain = _plain(target, requests)
    engine, drafted = _drafted(target, _proposer(name, target, TREES["static"]), requests, 7)
    assert [(c.tokens, c.reason) for c in drafted] == [(c.tokens, c.reason) for c in plain]
    assert any(c.reason == "stop" for c in drafted)
    for done in drafted:
        mine = [r for r in engine.records if r.request == done.id]
        assert 1 + sum(r.emitted for r in mine) == len(done.tokens) == len(done.writers)


@pytest.mark.parametrize("tree", list(TREES))
def test_rows_near_their_end_get_shallower_trees(tree: str) -> None:
    """Limits of 1 to 7 tokens and a full context: nothing is emitted or written beyond."""
    target = _target("llama")
    requests = [Request(str(i), prompt, i + 1) for i, prompt in enumerate(RAGGED_PROMPTS)]
    requests.append(Request("context", [5, 6] * 27, 50))
    plain = [Engine(target, max_length=57).generate([r])[0] for r in requests]
    engine = Engine(target, _proposer("draft_lm-perfect", target, TREES[tree]), max_batch=8, max_length=57)
    drafted = engine.generate(requests)
    assert [(c.tokens, c.reason) for c in drafted] == [(c.tokens, c.reason) for c in plain]
    assert drafted[-1].reason == "context" and len(drafted[-1].tokens) == 3
    left = {c.id: len(c.tokens) - 1 for c in drafted}
    for record in engine.records:
        assert record.levels <= max(0, left[record.request] - 1)
        left[record.request] -= record.emitted


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["eagle3-small-vocabulary", "medusa", "draft_lm"])
def test_sampled_rows_do_not_depend_on_the_batch(name: str, sampled: bool) -> None:
    """Each ragged row equals its run alone: random streams belong to the request."""
    target = _target("llama")
    requests = [
        Request(str(i), prompt, 6 + i, SamplingParams(temperature=0.9 if i != 3 else 0.0, top_p=0.9, seed=11))
        for i, prompt in enumerate(RAGGED_PROMPTS)
    ]
    for tree in (TREES["static"], TREES["dynamic"]):
        if isinstance(tree, DynamicTree) and (sampled or name == "medusa"):
            continue
        proposer = _proposer(name, target, tree, sampled)
        _, together = _drafted(target, proposer, requests, 7)
        alone = [_drafted(target, proposer, [request], 1)[1][0] for request in requests]
        assert [c.tokens for c in together] == [c.tokens for c in alone]
        assert together[3].tokens == _plain(target, [requests[3]])[0].tokens
