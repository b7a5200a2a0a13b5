"""Which labels are supervised: spans, padding, turns (case 1 of docs/cases.md)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import DraftBatch
from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.features.sources import OnlineFeatures
from drafttrain.losses.config import LossConfig
from drafttrain.losses.objective import Objective
from drafttrain.losses.supervision import label_mask, supervised
from tests.tiny_training import tiny_target

FAMILIES: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(taps=(0, 2, 3), depth=3),
    "eagle1": Eagle1Config(depth=3, feature_noise=0.0),
    "medusa": MedusaConfig(num_heads=3),
    "draft_lm": DraftLMConfig(layers=(0, 3)),
}


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


@pytest.mark.parametrize("family", FAMILIES)
def test_no_other_label_reaches_a_draft(family: str) -> None:
    """From the spans of samples to the gradient of each depth: alone with padding behind, and packed behind another."""
    target = tiny_target()
    draft = build_drafter(FAMILIES[family], target.config)
    init_from_target(draft, target)
    first = Sample("first", np.arange(20, 26, dtype=np.int32), [(2, 5)])
    second = Sample("second", np.arange(40, 51, dtype=np.int32), [(4, 8)])
    batch = OnlineFeatures(target, draft.feature_spec).batch([[second], [first, second]], torch.device("cpu"))
    outputs = [
        replace(out, readout=out.readout.detach().requires_grad_())
        for out in draft.unroll(batch, min(3, draft.max_depth))
    ]
    objective = Objective(LossConfig.model_validate({"terms": [{"name": "ce"}]}))
    counts = objective.counts(batch, len(outputs))
    objective(outputs, batch, draft.head, target.head(), draft.vocab_map, counts).loss.backward()
    for k, out in enumerate(outputs):
        assert out.readout.grad is not None
        reached = out.readout.grad.any(-1)
        found = [[slot + out.offset for slot in labels(reached, row)] for row in (0, 1)]
        assert found == [list(range(5 + k, 9)), [*range(3 + k, 6), *range(11 + k, 15)]]
