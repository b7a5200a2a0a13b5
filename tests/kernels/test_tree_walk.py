"""Walks: kernels against definitions, and definitions against the engine's verifiers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from drafttrain.engine.sampling import RowStreams, SamplingParams
from drafttrain.engine.tree import TreeShape
from drafttrain.engine.verify import Proposal, verify_chain
from drafttrain.engine.verify_batch import verify_batch
from drafttrain.engine.verify_tree import verify_tree
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.ops.tree_walk import Family, Walk, chain_family, walk_by_match, walk_by_rejection
from tests.numerics.chi_square import VOCAB, assert_follows

TREE = TreeShape.from_branching((3, 2, 2))


def assert_same(got: Walk, want: Walk) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.cpu(), other.cpu())


def random_tree(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Tokens of TREE, the children of a node different."""
    tree = TREE.on(torch.device("cpu"))[0]
    assert tree.children is not None
    tokens = torch.zeros(rows, TREE.nodes, dtype=torch.int64)
    for row in range(rows):
        for children in tree.children.tolist():
            own = [child - 1 for child in children if child]
            tokens[row, own] = torch.randperm(vocab, generator=generator)[: len(own)]
    return tokens


def on(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    return [x.to(device) for x in tensors]


@pytest.mark.parametrize("shape", ["tree", "own trees", "chain"])
def test_matching(shape: str, device: torch.device) -> None:
    """Trees that all rows share, trees of their own, chains; any number of the tokens counts, none included."""
    generator = torch.Generator().manual_seed(0)
    rows, vocab = 12, 4
    tokens = random_tree(rows, vocab, generator)
    parents, reach = TREE.on(torch.device("cpu"))[0].parents, 3
    if shape == "own trees":
        parents = parents.repeat(rows, 1)
        parents[::2] = torch.arange(TREE.nodes)  # chains
        reach = TREE.nodes
    elif shape == "chain":
        tokens, reach = tokens[:, :5], 5
        parents = torch.arange(5)[None]
    nodes = tokens.shape[1]
    chosen = torch.randint(0, vocab, (rows, nodes + 1), generator=generator)
    counts = torch.randint(0, nodes + 1, (rows,), generator=generator)
    want = walk_by_match(chosen, tokens, counts, parents, reach, impl="reference")
    got = walk_by_match(*on(device, chosen, tokens, counts, parents), reach, impl="triton")
    assert_same(got, want)
    assert int(want.accepted.min()) == 0 and int(want.accepted.max()) > 0


def test_a_tree_of_64_nodes(device: torch.device) -> None:
    """All of it a chain that is kept to the end."""
    tokens = torch.arange(64)[None]
    chosen = torch.arange(65)[None]
    walk = walk_by_match(*on(device, chosen, tokens, torch.tensor([64]), torch.arange(64)[None]), 64, impl="triton")
    assert walk.accepted.tolist() == [64] and walk.bonus.tolist() == [64]
    assert walk.path.tolist() == [list(range(65))]


class Sampled:
    """Random distributions, and tokens drawn from the draft's."""

    def __init__(self, rows: int, vocab: int, draft_vocab: int, chain: int = 0, narrow: bool = False) -> None:
        self.generator = generator = torch.Generator().manual_seed(3)
        self.map = VocabMap.from_ids(torch.randperm(vocab, generator=generator)[:draft_vocab], vocab)
        tree = TREE.on(torch.device("cpu"))[0]
        assert tree.children is not None and tree.q_rows is not None
        self.family = chain_family(chain, torch.device("cpu")) if chain else Family(tree.children, tree.q_rows)
        self.nodes, depth = (chain, chain) if chain else (TREE.nodes, TREE.depth)
        self.logits = torch.randn(rows, self.nodes + 1, vocab, generator=generator) * 2
        self.p = self.logits.softmax(-1)
        self.q = torch.randn(rows, int(self.family.q_rows.max()) + 1, draft_vocab, generator=generator).softmax(-1)
        if narrow:  # two tokens of weight: the third child is drawn from the untried
            self.q = torch.where(self.q >= self.q.topk(2, -1).values[..., 1:], self.q, 0.0)
            self.q = self.q / self.q.sum(-1, keepdim=True)
        self.tokens = torch.zeros(rows, self.nodes, dtype=torch.int64)
        for place, children in enumerate(self.family.children.tolist()):
            q = self.q[:, self.family.q_rows[place]].clone()
            for child in children:
                if child:
                    drawn = torch.multinomial(torch.where(q.sum(1, keepdim=True) > 0, q, 1.0), 1, generator=generator)
                    self.tokens[:, child - 1] = self.map.to_target(drawn[:, 0])
                    q.scatter_(1, drawn, 0.0)
        self.counts = torch.randint(0, self.nodes + 1, (rows,), generator=generator)
        self.decides = torch.rand(rows, self.nodes, generator=generator, dtype=torch.float64)
        self.draws = torch.rand(rows, depth + 1, generator=generator, dtype=torch.float64)

    def walk(self, impl: str, device: torch.device) -> Walk:
        """Verified by an implementation."""
        p, q, tokens, counts, to_draft, decides, draws, children, q_rows = on(
            device, self.p, self.q, self.tokens, self.counts, self.map.to_draft, self.decides, self.draws, *self.family
        )
        family = Family(children, q_rows)
        return walk_by_rejection(p, q, tokens, counts, family, to_draft, decides, draws, impl=impl)  # type: ignore[arg-type]


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("chain", [0, 3])
@pytest.mark.parametrize("draft_vocab", [23, 9])
def test_rejection(draft_vocab: int, chain: int, narrow: bool, device: torch.device) -> None:
    case = Sampled(12, 23, draft_vocab, chain, narrow)
    want = case.walk("reference", torch.device("cpu"))
    assert_same(case.walk("triton", device), want)
    assert narrow or 0 == int(want.accepted.min()) < int(want.accepted.max())


def test_a_vocabulary_of_several_blocks(device: torch.device) -> None:
    case = Sampled(3, 2500, 1200)
    assert_same(case.walk("triton", device), case.walk("reference", torch.device("cpu")))


def test_greedy_rows_are_the_limit(device: torch.device) -> None:
    """One-hot p: a child is kept exactly where it is the argmax."""
    case = Sampled(10, 7, 7)
    best = case.logits.argmax(-1)
    case.p = torch.nn.functional.one_hot(best, 7).float()
    parents = TREE.on(torch.device("cpu"))[0].parents
    want = walk_by_match(best, case.tokens, case.counts, parents, TREE.depth, impl="reference")
    assert_same(case.walk("triton", device), want)


@pytest.mark.parametrize("chain", [True, False])
def test_first_tokens_follow_the_target(chain: bool, device: torch.device) -> None:
    """Chi-square on a 16-token vocabulary, of the kernel on a GPU and of the definition, which it equals, elsewhere."""
    rows = 20_000
    case = Sampled(1, VOCAB, VOCAB, chain=2 if chain else 0)
    p, q = case.p.clone(), case.q.clone()
    case.p, case.q = p.expand(rows, -1, -1), q.expand(rows, -1, -1)
    generator = torch.Generator().manual_seed(5)
    case.tokens = torch.zeros(rows, case.nodes, dtype=torch.int64)
    for place, children in enumerate(case.family.children.tolist()):
        own = [child - 1 for child in children if child]
        if own:
            weights = q[0, case.family.q_rows[place]].expand(rows, -1)
            case.tokens[:, own] = torch.multinomial(weights, len(own), generator=generator)
    case.counts = torch.full((rows,), case.nodes)
    case.decides = torch.rand(rows, case.nodes, generator=generator, dtype=torch.float64)
    case.draws = torch.rand(rows, case.draws.shape[1], generator=generator, dtype=torch.float64)
    walk = case.walk("auto", device)
    accepted, bonus, path = walk.accepted.cpu(), walk.bonus.cpu(), walk.path.cpu()
    first = case.tokens.gather(1, path[:, 1:2] - 1)[:, 0]
    assert_follows(torch.where(accepted > 0, first, bonus), p[0, 0])
    assert 0.1 < float((accepted > 0).float().mean()) < 0.99


def test_the_engine_s_verifiers_are_these() -> None:
    """Greedy verdicts of the engine on the CPU are the walks of the definition."""
    case = Sampled(12, 7, 7)
    greedy = [SamplingParams()] * 12
    tree = TREE.on(torch.device("cpu"))[0]
    best = case.logits.argmax(-1)
    verdict = verify_tree(case.logits, Proposal(case.tokens, case.counts, tree=tree), greedy, [None] * 12)
    want = walk_by_match(best, case.tokens, case.counts, tree.parents, TREE.depth)
    assert torch.equal(verdict.accepted, want.accepted) and torch.equal(verdict.bonus, want.bonus)
    assert verdict.path is not None and torch.equal(verdict.path, want.path[:, : verdict.path.shape[1]])
    chain = Proposal(case.tokens[:, :4], case.counts.clamp(max=4))
    verdict = verify_chain(case.logits[:, :5], chain, greedy, [None] * 12)
    want = walk_by_match(best[:, :5], chain.tokens, chain.counts, torch.arange(4)[None], 4)
    assert torch.equal(verdict.accepted, want.accepted) and torch.equal(verdict.bonus, want.bonus)


@pytest.mark.parametrize("chain", [0, 3])
@pytest.mark.parametrize("draft_vocab", [23, 9])
def test_sampled_verdicts_of_the_engine_are_these(draft_vocab: int, chain: int, device: torch.device) -> None:
    """The verifiers that the engine uses on a CPU, and the kernel that it uses on CUDA, from the same streams."""
    rows = 10
    case = Sampled(rows, 23, draft_vocab, chain)
    params = [SamplingParams(temperature=0.0 if i % 4 == 0 else 1.0, seed=i) for i in range(rows)]
    streams = [None if p.greedy else RowStreams(p.seed, str(i)).verdict(3) for i, p in enumerate(params)]
    tree = None if chain else TREE.on(torch.device("cpu"))[0]
    proposal = Proposal(case.tokens, case.counts, case.q, case.map, tree)
    want = verify_batch(case.logits, proposal, params, streams, impl="reference")
    there = replace(proposal, tokens=case.tokens.to(device), q=case.q.to(device), tree=tree and TREE.on(device)[0])
    got = verify_batch(case.logits.to(device), there, params, streams, impl="triton")
    assert torch.equal(got.accepted, want.accepted) and torch.equal(got.bonus.cpu(), want.bonus)
    assert (got.path is None) == (want.path is None)
    if got.path is not None and want.path is not None:
        assert torch.equal(got.path, want.path)
