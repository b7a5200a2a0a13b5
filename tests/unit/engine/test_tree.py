"""Shapes of trees, and what is precomputed of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.engine.tree import MAX_NODES, DynamicTree, TreeShape, ancestors
from drafttrain.errors import EngineError

CPU = torch.device("cpu")


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    count = draw(st.integers(1, MAX_NODES))
    return TreeShape.from_parents([draw(st.integers(-1, node - 1)) for node in range(count)])


def path_of(shape: TreeShape, node: int) -> list[int]:
    """Nodes from the child of the root down to `node`, by following parents."""
    path = [node]
    while shape.parents[path[0]] >= 0:
        path.insert(0, shape.parents[path[0]])
    return path


@given(shapes())
@settings(max_examples=60, deadline=None)
def test_a_tree_says_who_descends_from_whom(shape: TreeShape) -> None:
    tree, _, slots = shape.on(CPU)
    sees = tree.sees[0]
    assert sees[0].nonzero()[:, 0].tolist() == [0]
    for node in range(shape.nodes):
        path = path_of(shape, node)
        assert sees[node + 1].nonzero()[:, 0].tolist() == [0, *(n + 1 for n in path)]
        assert shape.depths[node] == len(path) == int(tree.depths[0, node])
        siblings = [n for n in range(shape.nodes) if shape.parents[n] == shape.parents[node]]
        assert siblings[shape.ranks[node]] == node
    parents = set(shape.parents) - {-1}
    assert [n for n in range(shape.nodes) if slots[n] >= 0] == sorted(parents)
    assert shape.read_ahead == len(parents) == int(slots.max()) + 1
    assert torch.equal(sees, ancestors(tree.parents, shape.depth)[0])


@given(shapes())
@settings(max_examples=60, deadline=None)
def test_levels_grow_every_node_once(shape: TreeShape) -> None:
    tree, levels, slots = shape.on(CPU)
    assert len(levels) == shape.depth
    made: list[int] = []
    read: list[int] = []
    above = [-1]
    for depth, level in enumerate(levels):
        here = level.nodes.tolist() if depth else [-1]
        assert level.offset == len(read)
        read += level.nodes.tolist()
        for row, node in enumerate(level.nodes.tolist()):
            assert above[int(level.parents[row])] == shape.parents[node]
            assert [read[slot] for slot in level.sees[row].nonzero()[:, 0].tolist()] == path_of(shape, node)
        for child, (origin, rank) in enumerate(zip(level.origin.tolist(), level.rank.tolist(), strict=True)):
            node = level.start + child
            made.append(node)
            assert shape.parents[node] == here[origin] and shape.ranks[node] == rank < level.fanout
        above = here
    assert made == list(range(shape.nodes))
    assert slots[read].tolist() == list(range(len(read)))
    assert tree.children is not None and tree.q_rows is not None
    for place in range(shape.nodes + 1):
        children = [n + 1 for n in range(shape.nodes) if shape.parents[n] == place - 1]
        assert [c for c in tree.children[place].tolist() if c] == children
        if children:
            assert int(tree.q_rows[place]) == ([-1, *read].index(place - 1))


@given(shapes(), st.integers(1, MAX_NODES))
@settings(max_examples=60, deadline=None)
def test_a_cut_is_a_prefix(shape: TreeShape, depth: int) -> None:
    cut = shape.cut(depth)
    assert cut.parents == shape.parents[: cut.nodes]
    assert cut.depth == min(depth, shape.depth)
    assert all(d > depth for d in shape.depths[cut.nodes :])
    assert shape.cut(depth) is cut


def test_branching() -> None:
    assert TreeShape.from_branching((1, 1, 1)).parents == (-1, 0, 1)
    assert TreeShape.from_branching((3, 2)).parents == (-1, -1, -1, 0, 0, 1, 1, 2, 2)


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=3), min_size=1, max_size=3), st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_calibrated_tree_is_the_best_of_its_size(accuracies: list[list[float]], nodes: int) -> None:
    levels = [list(itertools.accumulate(ranks, min)) for ranks in accuracies]

    def worth(shape: TreeShape) -> float:
        chance: list[float] = []
        for node, parent in enumerate(shape.parents):
            ranks = levels[shape.depths[node] - 1]
            above = 1.0 if parent < 0 else chance[parent]
            chance.append(above * ranks[shape.ranks[node]])
        return sum(chance)

    def fits(shape: TreeShape) -> bool:
        return shape.depth <= len(levels) and all(
            rank < len(levels[depth - 1]) for depth, rank in zip(shape.depths, shape.ranks, strict=True)
        )

    best = TreeShape.from_accuracies(accuracies, nodes)
    everything = [
        TreeShape.from_parents(parents)
        for parents in itertools.product(*(range(-1, node) for node in range(best.nodes)))
    ]
    assert worth(best) == pytest.approx(max(worth(shape) for shape in everything if fits(shape)))


def test_a_tree_as_large_as_the_accuracies_allow() -> None:
    assert TreeShape.from_accuracies([[0.5, 0.4], [0.1]], 64).parents == (-1, -1, 0, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TreeShape(()), "a tree of 0 nodes"),
        (lambda: TreeShape((-1,) * 65), "a tree of 65 nodes"),
        (lambda: TreeShape((-1, 1)), "node 1 of a tree has parent 1"),
        (lambda: TreeShape((-2,)), "node 0 of a tree has parent -2"),
        (lambda: TreeShape((-1, 0, -1)), "level order"),
        (lambda: TreeShape.from_parents((0,)), "node 0 of a tree has parent 0"),
        (lambda: TreeShape.from_branching((3, 0)), "branching"),
        (lambda: TreeShape.from_branching((8, 8)), "more than 64 nodes"),
        (lambda: TreeShape.from_accuracies([], 4), "at least one node"),
        (lambda: DynamicTree(depth=0), "at least 1"),
        (lambda: DynamicTree(nodes=65), "65 nodes"),
    ],
)
def test_what_is_no_tree_is_refused(make: object, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        make()  # type: ignore[operator]
