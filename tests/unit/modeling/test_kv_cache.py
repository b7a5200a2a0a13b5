"""Compaction, masks and positions of the static cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.modeling.kv_cache import StaticKVCache


def filled(rows: int, length: int, kv_heads: list[int], head_dim: list[int]) -> StaticKVCache:
    """Every entry its own number."""
    cache = StaticKVCache(len(kv_heads), kv_heads, head_dim, rows, length, torch.float32)
    for number, tensor in enumerate((*cache.k, *cache.v)):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 100_000 * number)
    return cache


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_compaction_moves_what_it_is_told_and_nothing_else(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    lengths = torch.tensor([data.draw(st.integers(0, 6)) for _ in range(rows)])
    kept = data.draw(st.integers(1, width))
    paths = []
    for _ in range(rows):
        chosen = sorted(data.draw(st.sets(st.integers(0, width - 1), min_size=kept, max_size=kept)))
        own = data.draw(st.integers(0, kept))
        paths.append(chosen[:own] + list(range(own, kept)))
    first = data.draw(st.integers(0, 1))
    cache = filled(rows + first, 16, [2, 1, 2], [3, 4, 3])
    before = [t.clone() for t in (*cache.k, *cache.v)]
    cache.set_lengths(lengths, first)
    cache.begin(rows, width, first_row=first)
    cache.compact(torch.tensor(paths))
    for old, new in zip(before, (*cache.k, *cache.v), strict=True):
        expected = old.clone()
        for row, (path, start) in enumerate(zip(paths, lengths.tolist(), strict=True)):
            for place, source in enumerate(path):
                expected[first + row, :, start + place] = old[first + row, :, start + source]
        assert torch.equal(new, expected)
    assert cache.lengths[first:].tolist() == lengths.tolist()


@pytest.mark.parametrize("lengths", [[4, 4], [2, 5], [0, 3]])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_mask_of_a_tree_read_in_two_steps(lengths: list[int], window: int | None, shared: bool) -> None:
    """Two nodes are in the cache, three are new: each sees the text and its ancestors inside the window."""
    cache = StaticKVCache(1, 1, 2, 2, 12, torch.float32)
    cache.set_lengths(torch.tensor(lengths))
    own = [[[1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [0, 1, 0, 0, 1]], [[0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 1, 1, 0, 1]]]
    sees = torch.tensor(own[:1] if shared else own).bool()
    cache.begin(2, 3, sees, offset=2)
    mask = cache.mask(window)
    assert mask is not None
    mask = mask.expand(2, -1, -1, -1)
    assert mask.shape == (2, 1, 3, max(lengths) + 5)
    for row, length in enumerate(lengths):
        for new in range(3):
            ancestors = [i for i, seen in enumerate((own * 2 if shared else own)[0 if shared else row][new]) if seen]
            position = length + len(ancestors) - 1
            assert int(cache.positions()[row, new]) == position
            visible = {column: column for column in range(length)}
            visible |= {length + slot: length + place for place, slot in enumerate(ancestors)}
            inside = [c for c, where in visible.items() if window is None or where > position - window]
            assert mask[row, 0, new].nonzero()[:, 0].tolist() == inside


def test_a_causal_tree_is_a_chain() -> None:
    cache = StaticKVCache(1, 1, 2, 2, 12, torch.float32)
    cache.set_lengths(torch.tensor([2, 6]))
    for window in (None, 4):
        cache.begin(2, 4)
        plain, places = cache.mask(window), cache.positions()
        cache.begin(2, 4, torch.ones(4, 4, dtype=torch.bool).tril())
        tree = cache.mask(window)
        assert plain is not None and tree is not None
        assert torch.equal(plain, tree) and torch.equal(places, cache.positions())
