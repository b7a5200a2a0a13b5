"""Sequoia's program, how acceptance by rank is counted, and the search for sub-layers to skip."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import pytest
import torch

from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.engine.calibration_file import SkipFile, TreeFile, read_skip, read_tree, write_calibration
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import EarlyExit, ReaderProposer, build_proposer
from drafttrain.engine.records import Request
from drafttrain.engine.sampling import SamplingParams
from drafttrain.engine.sequoia import RankCounter, best_tree, comb, fastest
from drafttrain.engine.skip_search import _Calibration, search_skips
from drafttrain.engine.tree import TreeShape
from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.course import Course
from tests.support import RAGGED_PROMPTS, tiny_target


@cache
def _target() -> CausalLM:
    return tiny_target()


def _tokens(shape: TreeShape, acceptance: list[list[float]]) -> float:
    chances: list[float] = []
    for node, parent in enumerate(shape.parents):
        level = min(shape.depths[node] - 1, len(acceptance) - 1)
        rank = shape.ranks[node]
        own = acceptance[level][rank] if rank < len(acceptance[level]) else 0.0
        chances.append(own * (1.0 if parent < 0 else chances[parent]))
    return 1 + sum(chances)


@pytest.mark.parametrize(
    "acceptance",
    [
        [[0.6, 0.2, 0.1]],
        [[0.3, 0.5, 0.1]],  # a second child better than the first: a greedy choice of nodes would miss it
        [[0.5, 0.3], [0.8, 0.1]],
        [[0.0, 0.9], [0.9, 0.0]],
    ],
)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_no_tree_of_that_size_emits_more(acceptance: list[list[float]], depth: int) -> None:
    for nodes in (1, 2, 3, 5):
        best = best_tree(acceptance, nodes, depth)
        assert best.shape.depth <= depth and best.shape.nodes <= nodes
        assert best.tokens == pytest.approx(_tokens(best.shape, acceptance))
        every = itertools.product(*(range(-1, node) for node in range(nodes)))
        shapes = [TreeShape.from_parents(parents) for parents in every]
        assert best.tokens == pytest.approx(max(_tokens(s, acceptance) for s in shapes if s.depth <= depth))


def test_a_draft_that_is_never_right_gets_one_node() -> None:
    assert best_tree([[0.0, 0.0]], 8, 3).shape.nodes == 1
    with pytest.raises(EngineError, match="65 nodes"):
        best_tree([[0.5]], 65, 3)


def test_size_follows_what_verification_costs() -> None:
    acceptance = [[0.7, 0.15, 0.05]]
    free = fastest(acceptance, {4: 1.0, 32: 1.0}, 0.0, range(1, 7))
    dear = fastest(acceptance, {4: 1.0, 32: 8.0}, 0.0, range(1, 7))
    slow = fastest(acceptance, {4: 1.0, 32: 1.0}, 0.5, range(1, 7))
    assert free.shape.nodes > 4 >= dear.shape.nodes
    assert slow.shape.depth < free.shape.depth


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_counted_ranks_of_a_perfect_draft(temperature: float) -> None:
    """Greedy or sampled, the eldest child of a draft that is the target is always kept."""
    target, shape = _target(), comb(3, 2)
    assert shape.parents == (-1, -1, -1, 0, 0, 0)
    draft = build_drafter(DraftLMConfig(layers=(0, 1, 2, 3)), target.config, None)
    init_from_target(draft, target)
    perfect = build_proposer(draft, tree=shape, sampled=True)
    engine = RankCounter(target, perfect, max_batch=3, max_length=64)
    engine.count(shape)
    params = SamplingParams(temperature=temperature, seed=1)
    engine.generate([Request(str(i), p, 11, params) for i, p in enumerate(RAGGED_PROMPTS[:4])])
    assert engine.acceptance()[0] == pytest.approx([1.0, 0.0, 0.0], abs=1e-6)
    assert engine.acceptance()[1] == pytest.approx([1.0, 0.0, 0.0], abs=1e-6)


def test_counted_ranks_are_those_of_the_targets_tokens() -> None:
    """At depth 1 by hand: the place of the target's next token among the draft's best."""
    target, shape = _target(), comb(4, 1)
    engine = RankCounter(target, ReaderProposer(EarlyExit(target, 3), tree=shape), max_length=64)
    engine.count(shape)
    requests = [Request(str(i), p, 12) for i, p in enumerate(RAGGED_PROMPTS[:3])]
    done = engine.generate(requests)
    hits, visits = torch.zeros(4), 0
    for request, completion in zip(requests, done, strict=True):
        ids = torch.tensor([request.prompt_ids + completion.tokens])
        with torch.no_grad():
            best = target.lm_head(target(ids, course=Course(end=3)).final)[0].topk(4).indices
        mine = [r for r in engine.records if r.request == request.id]
        place = len(request.prompt_ids)
        for record in mine:
            if record.proposed:
                rank = (best[place] == ids[0, place + 1]).nonzero()
                visits += 1
                if len(rank):
                    hits[int(rank[0, 0])] += 1
            place += record.emitted
    assert visits == int(engine.visits[0])
    assert engine.hits[0].tolist() == hits.tolist()


def _answers() -> list[tuple[list[int], list[int]]]:
    requests = [Request(str(i), p, 10) for i, p in enumerate(RAGGED_PROMPTS[:3])]
    return [
        (r.prompt_ids, c.tokens)
        for r, c in zip(requests, Engine(_target(), max_length=64).generate(requests), strict=True)
    ]


def test_the_whole_target_agrees_with_itself_and_a_part_as_the_engine_says() -> None:
    """On the target's own keys and values: what is measured is the first draft of a round."""
    answers, target = _answers(), _target()
    with torch.inference_mode():
        calibration = _Calibration(target, answers)
        assert calibration.agreement(Course()) == 1.0
        measured = calibration.agreement(Course(end=3))
    # Each place by the engine: one round of one draft token behind the answer so far.
    kept = places = 0
    engine = Engine(target, ReaderProposer(EarlyExit(target, 3)), k=1, max_length=64)
    for prompt, answer in answers:
        for end in range(1, len(answer)):
            engine.reset()
            engine.generate([Request("a", prompt + answer[: end - 1], 3)])
            kept += engine.records[0].accepted
            places += 1
    assert measured == pytest.approx(kept / places)


def test_the_search_leaves_out_what_is_not_missed() -> None:
    target = tiny_target(seed=3)
    with torch.no_grad():
        # An attention and an MLP that add nothing.
        target.layers[1].self_attn.o_proj.weight.zero_()
        target.layers[2].mlp.down_proj.weight.zero_()
    requests = [Request(str(i), p, 10) for i, p in enumerate(RAGGED_PROMPTS[:3])]
    done = Engine(target, max_length=64).generate(requests)
    found = search_skips(target, [(r.prompt_ids, c.tokens) for r, c in zip(requests, done, strict=True)], 40)
    assert 1 in found.attention and 2 in found.mlp
    assert found.agreement > 0.5 and 0 < found.cost < 1
    tokens = sum(found.agreement**d for d in range(found.k + 1))
    assert found.speedup == pytest.approx(tokens / (1 + found.k * found.cost))
    with pytest.raises(EngineError, match="too few for 8 sub-layers"):
        search_skips(target, [], 3)


def test_files(tmp_path: Path) -> None:
    tree = TreeFile("sequoia", (-1, -1, 0), True, {"tokens": 1.5})
    write_calibration(tmp_path / "t.json", tree)
    assert read_tree(tmp_path / "t.json") == tree and tree.shape.depth == 2
    skip = SkipFile((1,), (2, 3), {"weights_hash": "a", "name": "x"})
    write_calibration(tmp_path / "s.json", skip)
    assert read_skip(tmp_path / "s.json", {"weights_hash": "a"}) == skip
    with pytest.raises(EngineError, match="made for the target x"):
        read_skip(tmp_path / "s.json", {"weights_hash": "b"})
    with pytest.raises(EngineError, match="does not hold a tree"):
        read_tree(tmp_path / "s.json")
    with pytest.raises(EngineError, match="no such file"):
        read_skip(tmp_path / "none.json", {})
