"""Growing trees with a draft, level by level. The draft's own steps run over the nodes, under masks in its cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from drafttrain.engine.penalty import DraftPenalty
from drafttrain.engine.proposers.base import Row
from drafttrain.engine.sampling import draw, probabilities, top_tokens, uniforms
from drafttrain.engine.tree import DynamicTree, Level, Tree, TreeShape, ancestors
from drafttrain.engine.verify import Proposal
from drafttrain.engine.verify_tree import without_replacement
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.ops.draft_topk import expand, select


class TreeStep(Protocol):
    """A draft's step over one level of nodes."""

    def __call__(self, tokens: Tensor, parents: Tensor, sees: Tensor, offset: int, depth: int) -> Tensor:
        """Read the nodes' tokens.

        Args:
            tokens: int64 [n, w], target ids.
            parents: int64 [n or 1, w], which node of the step before each descends from.
            sees: bool [n or 1, w, offset + w], which of the nodes read in this round each one sees.
            offset: nodes read before.
            depth: of the nodes, from 1.

        Returns:
            logits [n, w, Vd] over what follows each node; [n, 1, Vd] if they are the same for all.
        """
        ...


class Grown(NamedTuple):
    """A proposal, and int64 [n or 1, N]: where in the draft's cache, behind a row's length, each node was read; -1
    for those that were not."""

    proposal: Proposal
    slots: Tensor


def grow_static(
    shape: TreeShape, rows: Sequence[Row], logits: Tensor, step: TreeStep, vocab_map: VocabMap, sampled: bool
) -> Grown:
    """Fill a shape.

    Args:
        shape: cut to the depth wanted.
        rows: whose trees.
        logits: [n, Vd] behind the root.
        step: reads a level.
        vocab_map: the draft's vocabulary.
        sampled: in rows that are sampled, draw children without replacement from the draft's distribution instead of
            taking its best tokens.
    """
    children = _Drawn(rows, shape) if sampled and any(row.streams is not None for row in rows) else _Best()
    penalty = DraftPenalty(rows, vocab_map)
    tokens, tree, slots = _fill(shape, penalty.apply(logits), _lowered(step, penalty), vocab_map, children)
    counts = torch.full((len(rows),), shape.nodes)
    return Grown(Proposal(tokens, counts, children.q(), vocab_map, tree), slots)


def grow_best(shape: TreeShape, logits: Tensor, step: TreeStep, vocab_map: VocabMap) -> tuple[Tensor, Tree, Tensor]:
    """Fill a shape with the draft's best tokens, without synchronising.

    Returns:
        tokens int64 [n, N], the tree, and `Grown.slots`.
    """
    return _fill(shape, logits, step, vocab_map, _Best())


def _lowered(step: TreeStep, penalty: DraftPenalty) -> TreeStep:
    """The step, with the rows' penalty on its logits."""

    def lowered(tokens: Tensor, parents: Tensor, sees: Tensor, offset: int, depth: int) -> Tensor:
        return penalty.apply(step(tokens, parents, sees, offset, depth))

    return lowered


def _fill(
    shape: TreeShape, logits: Tensor, step: TreeStep, vocab_map: VocabMap, children: _Best | _Drawn
) -> tuple[Tensor, Tree, Tensor]:
    tree, levels, slots = shape.on(logits.device)
    tokens = torch.empty(len(logits), shape.nodes, dtype=torch.int64, device=logits.device)
    logits = logits[:, None]
    for depth, level in enumerate(levels):
        if depth:
            logits = step(tokens[:, level.nodes], level.parents[None], level.sees[None], level.offset, depth)
        own = children.of(logits, level)
        tokens[:, level.start : level.start + own.shape[1]] = vocab_map.to_target(own)
    return tokens, tree, slots[None]


class _Best:
    """A node's children are the draft's best tokens."""

    def of(self, logits: Tensor, level: Level) -> Tensor:
        """logits [n, w or 1, Vd] -> draft ids [n, c]."""
        best = top_tokens(logits, level.fanout)[1]
        return best[:, level.origin if logits.shape[1] > 1 else level.origin * 0, level.rank]

    def q(self) -> Tensor | None:
        """Nothing was sampled."""
        return None


class _Drawn:
    """A node's children are sampled one after the other without replacement (Sequoia, arXiv 2402.12374)."""

    def __init__(self, rows: Sequence[Row], shape: TreeShape) -> None:
        self.params = [row.request.sampling for row in rows]
        streams = [None if row.streams is None else row.streams.proposal(len(row.tokens)) for row in rows]
        # One a node, in level order: a node's must not depend on how deep the trees of other rows are.
        self.uniform = uniforms(streams, shape.nodes)
        self._q: list[Tensor] = []

    def of(self, logits: Tensor, level: Level) -> Tensor:
        """logits [n, w or 1, Vd] -> draft ids [n, c]."""
        width = len(level.nodes) or 1
        count, vocab = len(logits), logits.shape[-1]
        q = probabilities(logits, self.params).expand(-1, width, -1)
        self._q.append(q)
        place = torch.zeros(width, level.fanout, dtype=torch.int64, device=logits.device)
        place[level.origin, level.rank] = level.start + torch.arange(len(level.rank), device=logits.device)
        uniform = self.uniform.to(logits.device)[:, place]
        greedy = torch.tensor([p.greedy for p in self.params], device=logits.device)[:, None]
        best = top_tokens(logits, level.fanout)[1].expand(-1, width, -1)
        tried = torch.zeros(count, width, vocab, dtype=torch.bool, device=logits.device)
        drawn = []
        for number in range(level.fanout):
            token = torch.where(greedy, best[..., number], draw(without_replacement(q, tried), uniform[..., number]))
            tried.scatter_(2, token[..., None], True)
            drawn.append(token)
        return torch.stack(drawn, -1)[:, level.origin, level.rank]

    def q(self) -> Tensor | None:
        """[n, 1 + nodes with children, Vd], the root's first."""
        return torch.cat(self._q, 1)


class GrownOnDevice(NamedTuple):
    """tokens int64 [n, N], counts int64 [n] on their device, the tree, and `Grown.slots`."""

    tokens: Tensor
    counts: Tensor
    tree: Tree
    slots: Tensor


def grow_dynamic(
    tree: DynamicTree, depth: int, rows: Sequence[Row], logits: Tensor, step: TreeStep, vocab_map: VocabMap
) -> Grown:
    """`grow_dynamic_on_device` for the engine; a row near its end gets no node deeper than it has room."""
    room = torch.tensor([row.room - 1 for row in rows], device=logits.device)
    penalty = DraftPenalty(rows, vocab_map)
    lowered = _lowered(step, penalty)
    grown = grow_dynamic_on_device(tree, depth, room, penalty.apply(logits), lowered, vocab_map)
    return Grown(Proposal(grown.tokens, grown.counts.cpu(), None, vocab_map, grown.tree), grown.slots)


def grow_dynamic_on_device(
    tree: DynamicTree, depth: int, room: Tensor, logits: Tensor, step: TreeStep, vocab_map: VocabMap
) -> GrownOnDevice:
    """Expand the likeliest nodes of each level, then keep the likeliest of all (EAGLE-2, arXiv 2406.16858).

    Args:
        tree: sizes.
        depth: levels to grow, at least 1.
        room: int64 [n], the deepest node that each row can keep.
        logits: [n, Vd] behind the root.
        step: reads a level.
        vocab_map: the draft's vocabulary.
    """
    count, device = len(logits), logits.device
    width = min(tree.top_k, logits.shape[-1])
    # Candidates of all levels, in level order.
    score, token = log_chances(logits[:, None], None, width)
    score, token = score.flatten(1), token.flatten(1)
    scores, tokens, parents = [score], [token], [torch.full_like(token, -1)]
    slots = []
    first = 0  # of the level's candidates
    # The first level's candidates are all expanded, in their order.
    chosen = torch.arange(width, device=device).expand(count, -1)
    sees = torch.zeros(1, 1, 0, dtype=torch.bool, device=device)
    own = torch.eye(width, dtype=torch.bool, device=device)[None]
    above = torch.zeros(1, width, dtype=torch.int64, device=device)
    for level in range(1, depth):
        slots.append((first + chosen, (level - 1) * width))
        seen = sees.expand(len(above), -1, -1).gather(1, above[..., None].expand(-1, -1, sees.shape[2]))
        sees = torch.cat([seen, own.expand(len(above), -1, -1)], 2)
        read = vocab_map.to_target(token.gather(1, chosen))
        below = step(read, above, sees, (level - 1) * width, level)
        score, following = log_chances(below, score.gather(1, chosen), width)
        parents.append((first + chosen).repeat_interleave(width, 1))
        first += token.shape[1]
        score, token = score.flatten(1), following.flatten(1)
        scores.append(score)
        tokens.append(token)
        chosen = select(score, width)
        above = chosen // width
    return _select(tree, room, scores, tokens, parents, slots, vocab_map)


def log_chances(logits: Tensor, score: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest of [n, w, V] and the chances of the paths to them, given those to the nodes [n, w]:
    (log-probabilities float32 [n, w, count], ids)."""
    if logits.is_cuda:
        return expand(logits, score, count)
    values, ids = top_tokens(logits, count)
    chance = values.float() - logits.float().logsumexp(-1, keepdim=True)
    return chance if score is None else score[..., None] + chance, ids


def _select(
    tree: DynamicTree,
    room: Tensor,
    scores: list[Tensor],
    tokens: list[Tensor],
    parents: list[Tensor],
    slots: list[tuple[Tensor, int]],
    vocab_map: VocabMap,
) -> GrownOnDevice:
    """The likeliest `tree.nodes` candidates of each row, in level order.

    A child is never likelier than its parent and comes behind it in a stable sort, so what is kept is a tree.
    """
    device = tokens[0].device
    score, token, parent = torch.cat(scores, 1), torch.cat(tokens, 1), torch.cat(parents, 1)
    level = torch.cat([torch.full((len(part[0]),), depth + 1, device=device) for depth, part in enumerate(tokens)])
    score = score.masked_fill(level > room[:, None], -torch.inf)
    count = min(tree.nodes, score.shape[1])
    kept = score.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
    # Where a row has fewer candidates, what is out of its reach fills up: deeper, so at the end, and not counted.
    counts = (level[kept] <= room[:, None]).sum(1)
    number = torch.full_like(token, -1)
    number.scatter_(1, kept, torch.arange(count, device=device).expand(len(room), -1))
    above = parent.gather(1, kept)
    places = torch.where(above < 0, 0, number.gather(1, above.clamp(min=0)) + 1)
    read = torch.full_like(token, -1)
    for candidates, offset in slots:
        read.scatter_(1, candidates, (offset + torch.arange(candidates.shape[1], device=device)).expand_as(candidates))
    depths = level[kept]
    return GrownOnDevice(
        vocab_map.to_target(token.gather(1, kept)),
        counts,
        Tree(places, depths, ancestors(places, len(scores))),
        read.gather(1, kept),
    )
