"""The best shape of a tree for what a draft is worth and a machine can do (Sequoia, arXiv 2402.12374)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers.base import Row
from drafttrain.engine.tree import MAX_NODES, TreeShape
from drafttrain.engine.verify import Proposal, Verdict
from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM

_FEW = 20
"""Visits below which a depth is taken to be like the one above it."""


@dataclass(frozen=True)
class BestTree:
    """A shape, and the tokens that a round with it emits in the mean, the target's own included."""

    shape: TreeShape
    tokens: float


def best_tree(acceptance: Sequence[Sequence[float]], nodes: int, depth: int) -> BestTree:
    """The shape of at most `nodes` nodes and `depth` levels that emits most, by dynamic programming.

    Args:
        acceptance: acceptance[d][j], how often the j-th child of a node d levels below the root is kept, once the
            target stands there. The last level stands for all deeper ones.
        nodes: 1 to 64.
        depth: at least 1.
    """
    if not 1 <= nodes <= MAX_NODES or depth < 1 or not acceptance or not acceptance[0]:
        raise EngineError(
            f"a tree of {nodes} nodes and depth {depth} from {len(acceptance)} measured depths",
            remedy=f"give 1 to {MAX_NODES} nodes, a depth and an acceptance of at least one each",
        )
    ranks = [acceptance[min(level, len(acceptance) - 1)] for level in range(depth)]
    # below[m]: (tokens, split) of the best m nodes under a node of a level, for each first rank; deepest level first.
    # split is how many of them go to the first child and what is under it.
    levels: list[list[list[tuple[float, int]]]] = []
    under = [0.0] * (nodes + 1)
    for rates in reversed(ranks):
        table: list[list[tuple[float, int]]] = [[(0.0, 0)] * (nodes + 1)]
        for rate in reversed(rates):
            after = table[0]
            row = [(0.0, 0)]
            for count in range(1, nodes + 1):
                best = (0.0, 0)
                for first in range(1, count + 1):
                    tokens = rate * (1 + under[first - 1]) + after[count - first][0]
                    if tokens > best[0] + 1e-12:
                        best = (tokens, first)
                row.append(best)
            table.insert(0, row)
        levels.insert(0, table)
        under = [tokens for tokens, _ in table[0]]
    parents: list[int] = []

    def grow(parent: int, level: int, rank: int, count: int) -> None:
        first = levels[level][rank][count][1] if level < depth else 0
        if not first:
            return
        node = len(parents)
        parents.append(parent)
        grow(node, level + 1, 0, first - 1)
        grow(parent, level, rank + 1, count - first)

    grow(-1, 0, 0, nodes)
    if not parents:
        # A draft that was never right: the smallest tree there is.
        parents.append(-1)
    return BestTree(TreeShape.from_parents(parents), 1 + levels[0][0][nodes][0])


def comb(width: int, depth: int) -> TreeShape:
    """`width` children of the root and of each eldest child, `depth` levels: what ranks are measured with."""
    parents: list[int] = []
    spine = -1
    for _ in range(depth):
        first = len(parents)
        parents += [spine] * width
        spine = first
    return TreeShape(tuple(parents))


class RankCounter(Engine):
    """An engine that counts which child is kept, by depth.

    Attributes:
        hits: float64 [D, W].
        visits: float64 [D], how often the target stood on a node of that depth that had children.
    """

    def count(self, shape: TreeShape) -> None:
        """Begin to count, in trees of this shape."""
        # Rounds that stay on the device show no verdicts.
        self._rounds = None
        self._ranks = torch.tensor([0, *shape.ranks])
        self.hits = torch.zeros(shape.depth, shape.fanout, dtype=torch.float64)
        self.visits = torch.zeros(shape.depth, dtype=torch.float64)

    def _verify(self, logits: Tensor, proposal: Proposal, rows: list[Row]) -> Verdict:
        verdict = super()._verify(logits, proposal, rows)
        if verdict.path is None or proposal.tree is None:
            return verdict
        parents = proposal.tree.parents[0].cpu()
        for path, kept, count in zip(verdict.path, verdict.accepted.tolist(), proposal.counts.tolist(), strict=True):
            for depth in range(kept):
                self.visits[depth] += 1
                self.hits[depth, self._ranks[path[depth + 1]]] += 1
            # It stopped on a node: one with children refused them all.
            if bool((parents[:count] == path[kept]).any()):
                self.visits[kept] += 1
        return verdict

    def acceptance(self) -> list[list[float]]:
        """By depth and rank; a depth that was hardly visited is like the one above it.

        Raises:
            EngineError: no round had a tree.
        """
        if not float(self.visits[0]):
            raise EngineError(
                "no round of the calibration had a tree", remedy="give prompts with answers of several tokens"
            )
        measured: list[list[float]] = []
        for hits, visits in zip(self.hits, self.visits.tolist(), strict=True):
            if measured and visits < _FEW:
                measured.append(measured[-1])
            else:
                measured.append((hits / visits).tolist())
        return measured


@torch.inference_mode()
def verify_seconds(
    target: CausalLM, sizes: Sequence[int], rows: int = 1, context: int = 128, repeats: int = 5
) -> dict[int, float]:
    """Median seconds of the target's forward and head over the root and so many nodes, for each size.

    Args:
        target: prepared for inference.
        sizes: nodes.
        rows: requests side by side.
        context: tokens each has before.
        repeats: of each size, interleaved, so that a machine that slows down does so for all.
    """
    cache = target.new_cache(rows, context + max(sizes) + 1)
    cache.lengths[:] = context
    took: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(repeats + 1):
        for size in sizes:
            shape = TreeShape((-1,) * size) if size else None
            ids = torch.ones(rows, size + 1, dtype=torch.int64, device=target.device)
            start = _now(target)
            cache.begin(rows, size + 1, None if shape is None else shape.on(target.device)[0].sees)
            target.lm_head(target(ids, cache=cache).final)
            if repeat:
                took[size].append(_now(target) - start)
    return {size: statistics.median(seconds) for size, seconds in took.items()}


def _now(target: CausalLM) -> float:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


def fastest(
    acceptance: Sequence[Sequence[float]],
    verify_s: Mapping[int, float],
    level_s: float,
    depths: Sequence[int],
) -> BestTree:
    """The size and depth with most tokens a second: E[tokens] / (depth t_draft + t_verify(nodes)).

    Args:
        acceptance: as for `best_tree`.
        verify_s: seconds of a verification, by nodes; those are the sizes tried.
        level_s: seconds of the draft a level.
        depths: tried.
    """
    tried = [(best_tree(acceptance, nodes, depth), seconds) for nodes, seconds in verify_s.items() for depth in depths]
    return max(tried, key=lambda pair: pair[0].tokens / (pair[0].shape.depth * level_s + pair[1]))[0]
