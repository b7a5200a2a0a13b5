"""Which labels are supervised (cases 1 and 5 of the fault list: spans, padding, turns)."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.drafters.base import DraftBatch
from drafttrain.losses.supervision import label_mask, supervised


def labels(mask: torch.Tensor, row: int = 0) -> list[int]:
    return mask[row].nonzero().flatten().tolist()


def batch_of(spans: list[list[int]], segments: list[list[int]]) -> DraftBatch:
    s = torch.tensor(spans)
    return DraftBatch(tokens=torch.zeros_like(s), positions=s, segments=torch.tensor(segments), spans=s)


def test_span_4_to_8() -> None:
    spans = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 0]])
    assert labels(label_mask(spans, 0)) == [5, 6, 7, 8]
    assert labels(label_mask(spans, 1)) == [6, 7, 8]
    assert labels(label_mask(spans, 3)) == [8]
    assert labels(label_mask(spans, 4)) == []
    assert labels(label_mask(spans, 50)) == []


def test_never_across_turns_even_adjacent_ones() -> None:
    spans = torch.tensor([[0, 1, 1, 1, 0, 2, 2, 3, 3, 3]])
    assert labels(label_mask(spans, 0)) == [2, 3, 6, 8, 9]
    assert labels(label_mask(spans, 1)) == [3, 9]


def test_document_that_opens_with_a_span_has_no_feature_to_start_from() -> None:
    batch = batch_of([[0, 1, 1, 2, 2, 2, 2]], [[0, 0, 0, 1, 1, 1, 1]])
    assert labels(supervised(batch, 0)) == [2, 5, 6]  # 4 would start from the other document
    assert labels(supervised(batch, 1)) == [6]
    assert labels(supervised(batch_of([[1, 1, 1]], [[0, 0, 0]]), 0)) == [2]


@st.composite
def rows(draw: st.DrawFn) -> list[int]:
    out, number = [], 0
    for length, assistant in draw(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=6)):
        number += assistant
        out += [number if assistant else 0] * length
    return out


@settings(max_examples=60, deadline=None)
@given(rows(), st.integers(0, 5))
def test_equals_the_definition(spans: list[int], depth: int) -> None:
    want = [
        j
        for j in range(len(spans))
        if j - depth - 1 >= 0 and spans[j] != 0 and all(s == spans[j] for s in spans[j - depth - 1 : j + 1])
    ]
    tensor = torch.tensor([spans])
    assert labels(label_mask(tensor, depth)) == want
    assert not (label_mask(tensor, depth + 1) & ~label_mask(tensor, depth)).any()  # deeper is a subset
