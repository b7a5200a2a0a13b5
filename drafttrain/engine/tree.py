"""Trees of draft tokens: shapes that are fixed before a round, and the ancestry of what was proposed in it.

Nodes are numbered from 0 in level order, so that all nodes down to some depth are a prefix. The root, the last emitted
token, is no node; where it takes part it has place 0 and node i has place i + 1.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from drafttrain.errors import EngineError

MAX_NODES = 64
"""Ancestors of a node are the bits of one int64."""


class Tree(NamedTuple):
    """Who descends from whom, for each row or, with a first dimension of 1, for all rows alike.

    Attributes:
        parents: int64 [n or 1, N], the place of each node's parent, 0 = the root.
        depths: int64 [n or 1, N], 1 = child of the root.
        sees: bool [n or 1, N + 1, N + 1] over places: true where the second is the first or its ancestor.
        children: int64 [N + 1, M], places of each place's children, 0 where there are fewer; with `q_rows`.
        q_rows: int64 [N + 1], which row of a proposal's q a place's children were drawn from.
    """

    parents: Tensor
    depths: Tensor
    sees: Tensor
    children: Tensor | None = None
    q_rows: Tensor | None = None

    def first(self, nodes: int) -> Tree:
        """The first `nodes` nodes alone."""
        return self._replace(
            parents=self.parents[:, :nodes],
            depths=self.depths[:, :nodes],
            sees=self.sees[:, : nodes + 1, : nodes + 1],
        )


class Level(NamedTuple):
    """What one step of a draft reads, and the nodes that come of it.

    Attributes:
        nodes: int64 [w], nodes with children at this depth; empty at depth 0, where the root is read.
        parents: int64 [w], which of the level above they descend from.
        sees: bool [w, offset + w]: among the nodes read so far, each one's ancestors and itself.
        offset: nodes read before.
        start: number of the first child.
        origin, rank: int64 [c], for each child: which of `nodes` it descends from, and which of its children it is.
        fanout: most children of one node.
    """

    nodes: Tensor
    parents: Tensor
    sees: Tensor
    offset: int
    start: int
    origin: Tensor
    rank: Tensor
    fanout: int


@dataclass(frozen=True)
class TreeShape:
    """A tree that is the same in every round. The j-th child of a node is the draft's j-th best token there.

    Attributes:
        parents: for each node its parent, -1 = the root; in level order.

    Raises:
        EngineError: no node or more than 64, a parent that is no earlier node, or an order that is not by level.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.parents) <= MAX_NODES:
            raise EngineError(f"a tree of {len(self.parents)} nodes", remedy=f"it has 1 to {MAX_NODES}")
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise EngineError(
                    f"node {node} of a tree has parent {parent}", remedy="parents are -1 or earlier nodes"
                )
        if any(low > high for low, high in pairwise(self.depths)):
            raise EngineError("the nodes of a tree are not in level order", remedy="use TreeShape.from_parents")

    @staticmethod
    def from_parents(parents: Sequence[int]) -> TreeShape:
        """From parents in any order in which a parent comes before its children."""
        depths: list[int] = []
        for node, parent in enumerate(parents):
            if not -1 <= parent < node:
                raise EngineError(
                    f"node {node} of a tree has parent {parent}", remedy="parents are -1 or earlier nodes"
                )
            depths.append(1 if parent < 0 else depths[parent] + 1)
        order = sorted(range(len(parents)), key=depths.__getitem__)
        number = {node: place for place, node in enumerate(order)} | {-1: -1}
        return TreeShape(tuple(number[parents[node]] for node in order))

    @staticmethod
    def from_branching(branching: Sequence[int]) -> TreeShape:
        """Every node of depth d has branching[d] children: (3, 2) has 3 + 6 nodes."""
        if not branching or any(count < 1 for count in branching):
            raise EngineError(f"a tree with branching {list(branching)}", remedy="give a positive count for each depth")
        parents: list[int] = []
        level = [-1]
        for count in branching:
            first = len(parents)
            parents += [node for node in level for _ in range(count)]
            if len(parents) > MAX_NODES:
                raise EngineError(
                    f"a tree with branching {list(branching)} has more than {MAX_NODES} nodes",
                    remedy="branch less, or end it earlier",
                )
            level = list(range(first, len(parents)))
        return TreeShape(tuple(parents))

    @staticmethod
    def from_accuracies(accuracies: Sequence[Sequence[float]], nodes: int) -> TreeShape:
        """The `nodes` nodes most likely to be accepted (Medusa, arXiv 2401.10774, section 2.3.3).

        A node's chance is the product along its path; picking the best node whose parent and elder sibling are in
        is optimal where a later rank is never likelier than an earlier one. Chances that are not are lowered.

        Args:
            accuracies: accuracies[d][j], how often the j-th best token at depth d is right.
            nodes: how many; fewer if the ranks and depths given make fewer.
        """
        levels: list[list[float]] = []
        for ranks in accuracies:
            best = 1.0
            levels.append([best := min(best, max(0.0, float(chance))) for chance in ranks])
        if not levels or not levels[0] or nodes < 1:
            raise EngineError("a tree needs at least one node and the accuracies of one depth")
        parents: list[int] = []
        # (-chance, depth, parent, rank, chance of the parent): ties go to the shallower, then the elder.
        waiting = [(-levels[0][0], 0, -1, 0, 1.0)]
        while waiting and len(parents) < min(nodes, MAX_NODES):
            negative, depth, parent, rank, above = heapq.heappop(waiting)
            node = len(parents)
            parents.append(parent)
            if rank + 1 < len(levels[depth]):
                heapq.heappush(waiting, (-above * levels[depth][rank + 1], depth, parent, rank + 1, above))
            if depth + 1 < len(levels) and levels[depth + 1]:
                heapq.heappush(waiting, (negative * levels[depth + 1][0], depth + 1, node, 0, -negative))
        return TreeShape.from_parents(parents)

    @property
    def nodes(self) -> int:
        """How many there are, without the root."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node; 1 = child of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Of the deepest node."""
        return self.depths[-1]

    @property
    def read_ahead(self) -> int:
        """Nodes that a draft reads to grow it: those with children."""
        return len({parent for parent in self.parents if parent >= 0})

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Which child of its parent each node is, from 0."""
        born: dict[int, int] = {}
        ranks = []
        for parent in self.parents:
            ranks.append(born.get(parent, 0))
            born[parent] = ranks[-1] + 1
        return tuple(ranks)

    @property
    def fanout(self) -> int:
        """Most children of one node."""
        return max(self.ranks) + 1

    def cut(self, depth: int) -> TreeShape:
        """The nodes down to a depth of at least 1."""
        if depth >= self.depth:
            return self
        if depth not in self._cuts:
            self._cuts[depth] = TreeShape(self.parents[: sum(d <= depth for d in self.depths)])
        return self._cuts[depth]

    @cached_property
    def _cuts(self) -> dict[int, TreeShape]:
        return {}

    @cached_property
    def _tensors(self) -> dict[torch.device, tuple[Tree, list[Level], Tensor]]:
        return {}

    def on(self, device: torch.device) -> tuple[Tree, list[Level], Tensor]:
        """What rounds need of it, made once a device: its tree, the levels in which a draft grows it, and
        int64 [N], the place of each node among those the draft reads, -1 for leaves.
        """
        if device not in self._tensors:
            tree, levels, slots = self._build()
            self._tensors[device] = (
                Tree(*(None if field is None else field.to(device) for field in tree)),  # type: ignore[arg-type]
                [Level(*(f.to(device) if isinstance(f, Tensor) else f for f in level)) for level in levels],  # type: ignore[arg-type]
                slots.to(device),
            )
        return self._tensors[device]

    def _build(self) -> tuple[Tree, list[Level], Tensor]:
        count = self.nodes
        parents = torch.tensor(self.parents) + 1
        sees = ancestors(parents[None])
        children = torch.zeros(count + 1, self.fanout, dtype=torch.int64)
        children[parents, torch.tensor(self.ranks)] = torch.arange(1, count + 1)
        inner = [node for node in range(count) if children[node + 1, 0] > 0]
        slots = torch.full((count,), -1)
        slots[inner] = torch.arange(len(inner))
        q_rows = torch.zeros(count + 1, dtype=torch.int64)
        q_rows[1:] = (slots + 1).clamp(min=0)
        tree = Tree(parents[None], torch.tensor(self.depths)[None], sees, children, q_rows)
        levels = []
        read: list[int] = []
        above: list[int] = [-1]
        for depth in range(self.depth):
            nodes = [node for node in inner if self.depths[node] == depth]
            offset = len(read)
            read += nodes
            places = torch.tensor([node + 1 for node in read], dtype=torch.int64)
            here = nodes if depth else [-1]
            young = [node for node in range(count) if self.depths[node] == depth + 1]
            levels.append(
                Level(
                    nodes=torch.tensor(nodes, dtype=torch.int64),
                    parents=torch.tensor([above.index(self.parents[node]) for node in nodes], dtype=torch.int64),
                    sees=sees[0][places[offset:]][:, places],
                    offset=offset,
                    start=young[0],
                    origin=torch.tensor([here.index(self.parents[node]) for node in young]),
                    rank=torch.tensor([self.ranks[node] for node in young]),
                    fanout=max(self.ranks[node] for node in young) + 1,
                )
            )
            above = here
        return tree, levels, slots


@dataclass(frozen=True)
class DynamicTree:
    """A tree that follows the draft's confidence (EAGLE-2, arXiv 2406.16858).

    The `top_k` nodes of a level whose path is likeliest are expanded into their `top_k` likeliest tokens; of all
    tokens found, the `nodes` with the likeliest paths are proposed.

    Attributes:
        depth: levels.
        top_k: nodes expanded a level, and tokens each is expanded into.
        nodes: tokens proposed, without the root.
    """

    depth: int = 6
    top_k: int = 10
    nodes: int = 60

    def __post_init__(self) -> None:
        if self.depth < 1 or self.top_k < 1:
            raise EngineError(f"a dynamic tree of depth {self.depth} and top-k {self.top_k}: both are at least 1")
        if self.top_k > MAX_NODES:
            raise EngineError(f"a dynamic tree of top-k {self.top_k}", remedy=f"it is at most {MAX_NODES}")
        if not 1 <= self.nodes <= MAX_NODES:
            raise EngineError(f"a dynamic tree of {self.nodes} nodes", remedy=f"it has 1 to {MAX_NODES}")

    @property
    def read_ahead(self) -> int:
        """Nodes that a draft reads to grow it."""
        return self.top_k * (self.depth - 1)


def ancestors(parents: Tensor, depth: int | None = None) -> Tensor:
    """`Tree.sees` from `Tree.parents`: int64 [n, N] -> bool [n, N + 1, N + 1]. `depth`: of the deepest, if known."""
    count = parents.shape[1] + 1
    place = torch.arange(count, device=parents.device)
    above = torch.cat([parents.new_zeros(len(parents), 1), parents], 1)
    # Bit i - 1 of a place stands for place i; the root is everyone's ancestor and needs none.
    bits = torch.where(place > 0, torch.ones_like(place) << (place - 1).clamp(min=0), 0).expand(len(parents), -1)
    reach = 1
    while reach < (count if depth is None else depth):
        bits, above, reach = bits | bits.gather(1, above), above.gather(1, above), 2 * reach
    sees = (bits[..., None] >> (place - 1).clamp(min=0) & 1).bool()
    sees[..., 0] = True
    return sees
