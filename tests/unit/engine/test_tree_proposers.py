"""What trees a draft proposes, which are refused, and how Medusa's are calibrated."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.medusa.model import MedusaDrafter
from drafttrain.engine.calibrate import head_accuracies
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import build_proposer
from drafttrain.engine.proposers.base import Row
from drafttrain.engine.proposers.grow import grow_dynamic, grow_static
from drafttrain.engine.records import Request
from drafttrain.engine.sampling import top_tokens
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.errors import EngineError
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap
from tests.draft_support import new_draft
from tests.support import RAGGED_PROMPTS, tiny_target

VOCAB = 12


class Bigram:
    """A draft whose next token depends on the last one alone; it notes what it is asked."""

    def __init__(self) -> None:
        self.logits = 2 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
        self.chance = self.logits.log_softmax(-1)
        self.read: list[Tensor] = []

    def __call__(self, tokens: Tensor, parents: Tensor, sees: Tensor, offset: int, depth: int) -> Tensor:
        assert sees.shape[1:] == (tokens.shape[1], offset + tokens.shape[1])
        assert bool((sees.sum(-1) == depth).all())
        assert offset == sum(part.shape[1] for part in self.read)
        self.read.append(tokens)
        return self.logits[tokens]


def _rows(rooms: list[int]) -> list[Row]:
    return [Row(Request(str(i), [0], room + 1), [0], room + 1, None) for i, room in enumerate(rooms)]


def _likeliest(chance: Tensor, depth: int, top_k: int, nodes: int) -> set[tuple[int, ...]]:
    """EAGLE-2 by hand: paths of tokens behind token 0."""
    level = {(token,): float(chance[0, token]) for token in chance[0].topk(top_k).indices.tolist()}
    found = dict(level)
    for _ in range(depth - 1):
        best = sorted(level, key=lambda path: -level[path])[:top_k]
        level = {
            (*path, token): level[path] + float(chance[path[-1], token])
            for path in best
            for token in chance[path[-1]].topk(top_k).indices.tolist()
        }
        found |= level
    return set(sorted(found, key=lambda path: -found[path])[:nodes])


@pytest.mark.parametrize(("depth", "top_k", "nodes"), [(1, 3, 8), (3, 4, 10), (4, 3, 30), (5, 2, 6)])
def test_dynamic_tree_by_hand(depth: int, top_k: int, nodes: int) -> None:
    draft = Bigram()
    rows = _rows([9, 2, 1])
    root = draft.logits[0].expand(3, -1)
    grown = grow_dynamic(DynamicTree(depth, top_k, nodes), depth, rows, root, draft, VocabMap.full(VOCAB))
    tree, tokens = grown.proposal.tree, grown.proposal.tokens
    assert tree is not None
    read = torch.cat(draft.read, 1) if draft.read else tokens[:, :0]
    for row, room in enumerate([9, 2, 1]):
        count = int(grown.proposal.counts[row])
        paths = [
            tuple(int(tokens[row, place - 1]) for place in tree.sees[row, node + 1].nonzero()[1:, 0])
            for node in range(count)
        ]
        assert [len(path) for path in paths] == tree.depths[row, :count].tolist()
        assert len(set(paths)) == count
        if room == 9:
            assert set(paths) == _likeliest(draft.chance, depth, top_k, nodes)
        assert all(len(path) <= room for path in paths)
        slots = grown.slots[row, :count]
        for node in range(count):
            if slots[node] >= 0:
                assert int(read[row, slots[node]]) == int(tokens[row, node])
        # Whatever has children was read.
        assert all(bool(slots[place - 1] >= 0) for place in tree.parents[row, :count].tolist() if place)


def test_static_tree_holds_the_best_children() -> None:
    draft, shape = Bigram(), TreeShape.from_parents((-1, -1, 0, 0, 1, 2))
    grown = grow_static(shape, _rows([9]), draft.logits[:1], draft, VocabMap.full(VOCAB), False)
    tokens = grown.proposal.tokens[0].tolist()
    best = draft.logits.topk(2).indices.tolist()
    assert tokens[:2] == best[0] and tokens[2:4] == best[tokens[0]]
    assert tokens[4] == best[tokens[1]][0] and tokens[5] == best[tokens[2]][0]
    assert [part[0].tolist() for part in draft.read] == [tokens[:2], tokens[2:3]]


def test_top_tokens_looks_at_every_block() -> None:
    generator = torch.Generator().manual_seed(0)
    for vocab in (60, 640, 1000, 4099):
        logits = torch.randn(2, 3, vocab, generator=generator)
        for count in (1, 2, 7, vocab):
            values, ids = top_tokens(logits, count)
            assert torch.equal(values, logits.topk(count).values)
            assert torch.equal(logits.gather(-1, ids), values)
            assert all(len(set(row)) == count for row in ids.flatten(0, 1).tolist())


def test_trees_a_draft_cannot_propose() -> None:
    target = tiny_target()
    heads = new_draft(MedusaConfig(num_heads=2), target)
    with pytest.raises(EngineError, match="a tree of depth 3 was asked of 2 Medusa heads"):
        build_proposer(heads, tree=TreeShape.from_branching((2, 1, 1)))
    with pytest.raises(EngineError, match="dynamic tree"):
        build_proposer(heads, tree=DynamicTree())
    with pytest.raises(EngineError, match="static trees only"):
        build_proposer(new_draft(Eagle3Config(), target), tree=DynamicTree(), sampled=True)


def test_head_accuracies() -> None:
    """Against a loop over places, and a tree built of them."""
    target = tiny_target()
    drafter = cast(MedusaDrafter, new_draft(MedusaConfig(num_heads=2), target))
    requests = [Request(str(i), prompt, 9) for i, prompt in enumerate(RAGGED_PROMPTS[:3])]
    answers = [
        (r.prompt_ids, c.tokens)
        for r, c in zip(requests, Engine(target, max_length=40).generate(requests), strict=True)
    ]
    measured = head_accuracies(target, drafter, answers, top=4)
    hits, places = torch.zeros(2, 4), torch.zeros(2)
    with torch.no_grad():
        for prompt, answer in answers:
            ids = prompt + answer
            final = target(torch.tensor([ids]), taps=(Tap.final,)).taps[Tap.final][0]
            for root in range(len(prompt), len(ids)):
                for head in range(2):
                    if root + 1 + head < len(ids):
                        best = drafter.head(head)(drafter.blocks[head](final[root - 1])).topk(4).indices
                        hits[head] += best == ids[root + 1 + head]
                        places[head] += 1
    torch.testing.assert_close(torch.tensor(measured), hits / places[:, None])
    assert TreeShape.from_accuracies(measured, 6).nodes == 6
    with pytest.raises(EngineError, match="long enough"):
        head_accuracies(target, drafter, [([3, 4], [5, 6])])
