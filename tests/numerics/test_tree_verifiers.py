"""Tree verifiers sample the target's distribution: chi-square on a 16-token vocabulary, tokens accepted at each depth,
residual and bonus tokens apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafttrain.engine.proposers.base import Row
from drafttrain.engine.proposers.grow import grow_dynamic, grow_static
from drafttrain.engine.records import Request
from drafttrain.engine.sampling import RowStreams, SamplingParams, probabilities
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.engine.verify import Proposal, Verdict
from drafttrain.engine.verify_tree import verify_tree
from drafttrain.modeling.vocab_map import VocabMap
from tests.numerics.chi_square import SETTINGS, VOCAB, assert_follows, chi_square, critical

ROWS = 20_000
SHAPE = TreeShape.from_branching((3, 2))


class World:
    """Logits that depend on the last token, as of a bigram model, for target and draft."""

    def __init__(self, params: SamplingParams, spread: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self.target = torch.randn(VOCAB + 1, VOCAB, generator=generator) * 1.5
        self.draft = self.target + spread * torch.randn(VOCAB + 1, VOCAB, generator=generator)
        self.p = probabilities(self.target, [params] * (VOCAB + 1))
        self.q = probabilities(self.draft, [params] * (VOCAB + 1))
        self.rows = [Row(Request(str(i), [0], 9, params), [0], 9, RowStreams(params.seed, str(i))) for i in range(ROWS)]

    def step(self, tokens: Tensor, parents: Tensor, sees: Tensor, offset: int, depth: int) -> Tensor:
        """The draft's step; the root is the last row."""
        return self.draft[tokens]

    def root(self) -> Tensor:
        """The draft's logits behind the root."""
        return self.draft[VOCAB].expand(ROWS, -1)

    def verify(self, proposal: Proposal) -> Verdict:
        """Check it against the target's logits."""
        places = torch.cat([torch.full((ROWS, 1), VOCAB), proposal.tokens], 1)
        streams = [row.streams for row in self.rows]
        generators = [None if s is None else s.verdict(1) for s in streams]
        return verify_tree(self.target[places], proposal, [r.request.sampling for r in self.rows], generators)


def emitted(proposal: Proposal, verdict: Verdict) -> tuple[Tensor, Tensor]:
    """First and second token of each row [n]; -1 where there is no second."""
    assert verdict.path is not None
    path = torch.nn.functional.pad(verdict.path, (0, 1))
    tokens = torch.cat([torch.full((ROWS, 1), -1), proposal.tokens], 1)
    first = torch.where(verdict.accepted >= 1, tokens.gather(1, path[:, 1:2])[:, 0], verdict.bonus)
    second = torch.where(verdict.accepted >= 2, tokens.gather(1, path[:, 2:3])[:, 0], verdict.bonus)
    return first, torch.where(verdict.accepted >= 1, second, -1)


def assert_lossless(world: World, proposal: Proposal, verdict: Verdict) -> None:
    """First tokens, second tokens given the first, and bonus tokens behind whole paths follow the target."""
    first, second = emitted(proposal, verdict)
    assert_follows(first, world.p[VOCAB])
    accepted = first[verdict.accepted >= 1]
    common = torch.bincount(accepted, minlength=VOCAB).topk(2).indices.tolist()
    for token in common:
        kept = (first == token) & (second >= 0)
        assert_follows(second[kept], world.p[token])
    full = verdict.accepted == 2
    last = second[full]
    token = int(torch.bincount(last, minlength=VOCAB).argmax())
    assert_follows(verdict.bonus[full][last == token], world.p[token])


@pytest.mark.parametrize("spread", [0.3, 2.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_best_children(name: str, spread: float) -> None:
    """y ~ p at each node, walk to the child equal to y."""
    world = World(SETTINGS[name], spread)
    proposal = grow_static(SHAPE, world.rows, world.root(), world.step, VocabMap.full(VOCAB), False).proposal
    assert proposal.q is None
    verdict = world.verify(proposal)
    assert_lossless(world, proposal, verdict)
    # Accepted with the probability that the target gives to the children together.
    share = float((verdict.accepted >= 1).double().mean())
    assert share == pytest.approx(float(world.p[VOCAB, proposal.tokens[0, :3]].sum()), abs=4 * (0.25 / ROWS) ** 0.5)


@pytest.mark.parametrize("name", SETTINGS)
def test_dynamic_tree(name: str) -> None:
    world = World(SETTINGS[name], 1.0)
    tree = DynamicTree(depth=2, top_k=3, nodes=7)
    proposal = grow_dynamic(tree, 2, world.rows, world.root(), world.step, VocabMap.full(VOCAB)).proposal
    assert_lossless(world, proposal, world.verify(proposal))


@pytest.mark.parametrize("spread", [0.3, 2.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_children_without_replacement(name: str, spread: float) -> None:
    world = World(SETTINGS[name], spread)
    proposal = grow_static(SHAPE, world.rows, world.root(), world.step, VocabMap.full(VOCAB), True).proposal
    assert proposal.q is not None and proposal.q.shape == (ROWS, 4, VOCAB)
    # The first child is the draft's sample, and no token is proposed twice.
    assert_follows(proposal.tokens[:, 0], world.q[VOCAB])
    assert all(len(set(row[:3])) == 3 for row in proposal.tokens[:500].tolist())
    verdict = world.verify(proposal)
    assert_lossless(world, proposal, verdict)
    # A child is refused only where q > p, so no refused child comes out of the residual.
    refused = verdict.accepted == 0
    assert not bool((verdict.bonus[refused, None] == proposal.tokens[refused, :3]).any())


def test_small_draft_vocabulary() -> None:
    world = World(SETTINGS["temperature"], 0.5)
    vocab = VocabMap.from_ids([1, 3, 4, 8, 9, 15], VOCAB)

    def step(tokens: Tensor, parents: Tensor, sees: Tensor, offset: int, depth: int) -> Tensor:
        return vocab.restrict(world.draft[tokens])

    root = vocab.restrict(world.root())
    proposal = grow_static(SHAPE, world.rows, root, step, vocab, True).proposal
    assert_lossless(world, proposal, world.verify(proposal))


def test_more_children_than_the_draft_gives_weight() -> None:
    """top-k 2 leaves two tokens: the third child is drawn from the untried, and outputs still follow the target."""
    world = World(SamplingParams(temperature=1.0, top_k=2, seed=6), 2.0)
    proposal = grow_static(SHAPE, world.rows, world.root(), world.step, VocabMap.full(VOCAB), True).proposal
    first, _ = emitted(proposal, world.verify(proposal))
    assert_follows(first, world.p[VOCAB])


def test_without_replacement_accepts_more_than_the_best_children_where_the_draft_is_right() -> None:
    """Draft = target: the first child is always kept, whereas the best three tokens hold less than all of p."""
    world = World(SETTINGS["temperature"], 0.0)
    drawn = grow_static(SHAPE, world.rows, world.root(), world.step, VocabMap.full(VOCAB), True).proposal
    assert bool((world.verify(drawn).accepted == 2).all())
    best = grow_static(SHAPE, world.rows, world.root(), world.step, VocabMap.full(VOCAB), False).proposal
    assert float((world.verify(best).accepted >= 1).double().mean()) < 0.99


def test_negative_control_a_residual_that_forgets_the_tried_children() -> None:
    """Each child checked against the draft's first distribution, as if drawn with replacement: lossy."""
    world = World(SETTINGS["temperature"], 2.0)
    proposal = grow_static(SHAPE, world.rows, world.root(), world.step, VocabMap.full(VOCAB), True).proposal
    p, q = world.p[VOCAB].expand(ROWS, -1).clone(), world.q[VOCAB]
    generator = torch.Generator().manual_seed(9)
    out = torch.full((ROWS,), -1)
    for child in range(3):
        token = proposal.tokens[:, child]
        uniform = torch.rand(ROWS, generator=generator)
        keep = (out < 0) & (uniform * q[token] < p.gather(1, token[:, None])[:, 0])
        out[keep] = token[keep]
        residual = (p - q).clamp(min=0)
        p = torch.where((out < 0)[:, None], residual / residual.sum(-1, keepdim=True), p)
    rest = out < 0
    out[rest] = torch.multinomial(p[rest], 1, generator=generator)[:, 0]
    statistic, freedom = chi_square(out, world.p[VOCAB])
    assert statistic > critical(freedom)


def test_negative_control_shared_stream() -> None:
    """The uniforms that drew the children must not decide about them."""
    world = World(SETTINGS["temperature"], 2.0)
    shape = TreeShape.from_branching((3,))
    proposal = grow_static(shape, world.rows, world.root(), world.step, VocabMap.full(VOCAB), True).proposal
    places = torch.cat([torch.full((ROWS, 1), VOCAB), proposal.tokens], 1)
    generators = [RowStreams(SETTINGS["temperature"].seed, str(i)).proposal(1) for i in range(ROWS)]
    verdict = verify_tree(world.target[places], proposal, [SETTINGS["temperature"]] * ROWS, generators)
    first, _ = emitted(proposal, verdict)
    statistic, freedom = chi_square(first, world.p[VOCAB])
    assert statistic > critical(freedom)


def test_greedy_is_the_limit() -> None:
    """A greedy row among sampled ones follows the argmax whatever the children were drawn from."""
    params = SETTINGS["temperature"]
    world = World(params, 1.0)
    world.rows = world.rows[:50]
    for row in world.rows[::2]:
        row.request, row.streams = Request(row.request.id, [0], 9), None
    root = world.root()[:50]
    vocab = VocabMap.full(VOCAB)
    proposal = grow_static(SHAPE, world.rows, root, world.step, vocab, True).proposal
    places = torch.cat([torch.full((50, 1), VOCAB), proposal.tokens], 1)
    generators = [None if r.streams is None else r.streams.verdict(1) for r in world.rows]
    mixed = verify_tree(world.target[places], proposal, [r.request.sampling for r in world.rows], generators)
    alone = grow_static(SHAPE, world.rows[::2], root[::2], world.step, vocab, True).proposal
    assert torch.equal(alone.tokens, proposal.tokens[::2])
    greedy = verify_tree(world.target[places[::2]], alone, [SamplingParams()] * 25, [None] * 25)
    assert torch.equal(greedy.accepted, mixed.accepted[::2]) and torch.equal(greedy.bonus, mixed.bonus[::2])
    best = world.target.argmax(-1)
    assert int(greedy.bonus[0]) == int(best[places[0, int(greedy.path[0, greedy.accepted[0]])]])  # type: ignore[index]
