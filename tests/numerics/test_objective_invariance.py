"""The loss and its gradient do not depend on how documents are laid out: padding, packing, micro-batches, chunks.

The draft here is a plain function of a slot's feature and of the token it holds, so that whatever changes comes from
the objective. Everything is in fp64, so equal means equal.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafttrain.drafters.base import DepthOutput, DraftBatch
from drafttrain.losses.config import LossConfig
from drafttrain.losses.objective import Objective
from drafttrain.modeling.head import Head
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap

V, H, DEPTHS = 29, 6, 3
F64 = torch.float64
TERMS = [
    {"name": "lk", "full_target": True},
    {"name": "soft_ce", "weight": 0.1},
    {"name": "ce", "weight": 0.3},
    {"name": "smooth_l1"},
]

# A document: tokens, spans, final features.
Document = tuple[Tensor, Tensor, Tensor]


def documents() -> list[Document]:
    gen = torch.Generator().manual_seed(0)
    out = []
    for spans in ([0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 0, 0, 2, 2, 2, 2, 2, 2], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1]):
        n = len(spans)
        out.append(
            (
                torch.randint(0, V, (n,), generator=gen),
                torch.tensor(spans),
                torch.randn(n, H, generator=gen, dtype=F64),
            )
        )
    return out


def rows_of(layout: list[list[Document]], length: int) -> DraftBatch:
    """Documents of each row one after another, padded on the right with noise that must not matter."""
    gen = torch.Generator().manual_seed(9)
    shape = (len(layout), length)
    batch = DraftBatch(
        tokens=torch.randint(0, V, shape, generator=gen),
        positions=torch.zeros(shape, dtype=torch.int64),
        segments=torch.full(shape, -1),
        spans=torch.zeros(shape, dtype=torch.int64),
        features={Tap.final: 50 * torch.randn(*shape, H, generator=gen, dtype=F64)},
    )
    for b, row in enumerate(layout):
        at, n_spans = 0, 0
        for number, (tokens, spans, features) in enumerate(row):
            here = slice(at, at + len(tokens))
            batch.tokens[b, here] = tokens
            batch.positions[b, here] = torch.arange(len(tokens))
            batch.segments[b, here] = number
            batch.spans[b, here] = torch.where(spans > 0, spans + n_spans, 0)
            batch.features[Tap.final][b, here] = features
            at, n_spans = at + len(tokens), n_spans + int(spans.max())
    return batch


class Draft:
    """readout_k[t] = tanh(A_k f_t + E x_{t+1+k})."""

    def __init__(self) -> None:
        gen = torch.Generator().manual_seed(1)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, dtype=F64).requires_grad_()

        self.map = VocabMap.from_ids(torch.randperm(V, generator=gen)[:17], V)
        self.mix, self.embedding, self.weight = draw(DEPTHS, H, H), draw(V, H), draw(17, H)
        self.target = Head(draw(V, H).detach())
        self.parameters = [self.mix, self.embedding, self.weight]

    def unroll(self, batch: DraftBatch) -> list[DepthOutput]:
        features = batch.features[Tap.final]
        out = []
        for k in range(DEPTHS):
            held = torch.roll(batch.tokens, -1 - k, dims=1)
            state = torch.tanh(features @ self.mix[k] + self.embedding[held])
            out.append(DepthOutput(k, k + 2, state, state))
        return out


def outcome(micro_batches: list[DraftBatch], chunk_rows: int = 1024) -> list[Tensor]:
    """Loss, sums, hits, totals and gradients over micro-batches of one optimiser step."""
    draft = Draft()
    objective = Objective(LossConfig.model_validate({"terms": TERMS, "chunk_rows": chunk_rows}))
    counts = sum((objective.counts(batch, DEPTHS) for batch in micro_batches), torch.zeros(DEPTHS, dtype=F64))
    loss, sums, hits, totals = torch.zeros((), dtype=F64), torch.zeros(len(TERMS), DEPTHS, dtype=F64), 0, 0
    for batch in micro_batches:
        out = objective(draft.unroll(batch), batch, lambda depth: Head(draft.weight), draft.target, draft.map, counts)
        out.loss.backward()
        loss = loss + out.loss.detach()
        sums = sums + torch.stack([out.sums[str(term["name"])] for term in TERMS])
        hits, totals = hits + out.correct, totals + out.total
    grads = [p.grad for p in draft.parameters if p.grad is not None]
    return [loss, sums, torch.as_tensor(hits), torch.as_tensor(totals), *grads]


def equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) == 7
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12)


A, B, C, D = documents()
PADDED = outcome([rows_of([[A], [B], [C], [D]], 11)])


def test_something_is_supervised() -> None:
    assert PADDED[3].tolist() == [12, 8, 5] and all(g.any() for g in PADDED[4:])


@pytest.mark.parametrize(
    "layout, length",
    [
        ([[A], [B], [C], [D]], 30),
        ([[D], [C], [A], [B]], 11),
        ([[A, B], [C, D]], 18),
        ([[C, A], [B, D]], 25),
        ([[A, B, C, D]], 29),
        ([[D, A, C, B]], 40),
    ],
    ids=["wider padding", "other order", "packed in pairs", "other pairs, padded", "one row", "one row, padded"],
)
def test_padding_and_packing(layout: list[list[Document]], length: int) -> None:
    equal(outcome([rows_of(layout, length)]), PADDED)


@pytest.mark.parametrize("chunk_rows", [1, 2, 5, 9])
def test_chunks(chunk_rows: int) -> None:
    equal(outcome([rows_of([[A], [B], [C], [D]], 11)], chunk_rows), PADDED)


@pytest.mark.parametrize(
    "split",
    [[[[A]], [[B]], [[C]], [[D]]], [[[A, B]], [[C], [D]]], [[[D]], [[A, C, B]]]],
    ids=["one a batch", "uneven", "packed"],
)
def test_micro_batches_and_ranks_add_up(split: list[list[list[Document]]]) -> None:
    """Uneven micro-batches: a mean of means would differ. Ranks are the same sums, added by all-reduce."""
    equal(outcome([rows_of(layout, 24) for layout in split]), PADDED)


def test_a_mean_per_micro_batch_would_be_caught() -> None:
    """Negative control: each micro-batch divided by its own counts gives another gradient."""
    draft = Draft()
    objective = Objective(LossConfig.model_validate({"terms": TERMS}))
    for layout in ([[A], [B]], [[C], [D]]):
        batch = rows_of(layout, 11)
        counts = objective.counts(batch, DEPTHS)
        out = objective(draft.unroll(batch), batch, lambda depth: Head(draft.weight), draft.target, draft.map, counts)
        (out.loss / 2).backward()
    assert draft.weight.grad is not None
    assert not torch.allclose(draft.weight.grad, PADDED[-1], rtol=1e-3)
