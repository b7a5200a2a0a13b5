"""The objective against a dense computation, label by label, with autograd in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drafttrain.drafters.base import DepthOutput, DraftBatch
from drafttrain.losses.config import LossConfig
from drafttrain.losses.objective import Objective, ObjectiveOutput
from drafttrain.losses.supervision import label_mask
from drafttrain.modeling.head import Head
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap

V, H, HT = 31, 6, 5
SPANS = [[0, 0, 1, 1, 1, 1, 0, 2, 2, 2, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]]
SEGMENTS = [[0] * 12, [0] * 8 + [-1] * 4]


class Case:
    """Random draft states, heads and target; `leaves` are what has gradients."""

    def __init__(
        self,
        depths: int = 3,
        *,
        full: bool = False,
        shared: bool = True,
        softcap: float | None = None,
        bias: bool = False,
        offset: int = 2,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        gen = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)

        self.map = VocabMap.full(V) if full else VocabMap.from_ids(torch.randperm(V, generator=gen)[:19], V)
        rows, length = 2, 12
        spans = torch.tensor(SPANS)
        self.target_head = Head(draw(V, HT), draw(V) if bias else None, softcap, 0.7 if softcap else 1.0)
        self.batch = DraftBatch(
            tokens=torch.randint(0, V, (rows, length), generator=gen),
            positions=torch.arange(length).expand(rows, length),
            segments=torch.tensor(SEGMENTS),
            spans=spans,
            features={Tap.final: draw(rows, length, HT)},
        )
        self.batch.top1 = self.target_head(self.batch.features[Tap.final]).argmax(-1)
        self.weights = [draw(self.map.size, H).requires_grad_() for _ in range(1 if shared else depths)]
        self.biases = [draw(self.map.size).requires_grad_() if bias else None for _ in self.weights]
        self.softcap = softcap
        self.readouts = [draw(rows, length, H).requires_grad_() for _ in range(depths)]
        self.hiddens = [draw(rows, length, HT).requires_grad_() for _ in range(depths)]
        self.offset = offset

    def head(self, depth: int) -> Head:
        i = min(depth, len(self.weights) - 1)
        return Head(self.weights[i], self.biases[i], self.softcap, 0.7 if self.softcap else 1.0)

    @property
    def outputs(self) -> list[DepthOutput]:
        return [
            DepthOutput(k, k + self.offset, r, h)
            for k, (r, h) in enumerate(zip(self.readouts, self.hiddens, strict=True))
        ]

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.readouts, *self.weights, *(b for b in self.biases if b is not None)]

    def run(self, config: LossConfig, counts: Tensor | None = None) -> ObjectiveOutput:
        objective = Objective(config)
        if counts is None:
            counts = objective.counts(self.batch, len(self.readouts))
        return objective(self.outputs, self.batch, self.head, self.target_head, self.map, counts)


def dense(case: Case, config: LossConfig) -> tuple[Tensor, dict[str, list[Tensor]], list[int], list[int]]:
    """Loss, sums, hits and totals with one label at a time."""
    loss = torch.zeros((), dtype=torch.float64)
    sums: dict[str, list[Tensor]] = {term.name: [] for term in config.terms}
    hits, totals = [], []
    final, tokens = case.batch.features[Tap.final], case.batch.tokens
    for output in case.outputs:
        mask = label_mask(case.batch.spans, output.depth)
        parts = {name: torch.zeros((), dtype=torch.float64) for name in sums}
        hit = 0
        for b, j in mask.nonzero().tolist():
            if "smooth_l1" in parts:
                parts["smooth_l1"] = parts["smooth_l1"] + F.smooth_l1_loss(
                    output.hidden[b, j - output.offset], final[b, j - 1]
                )
            whole = case.target_head(final[b, j - 1])
            if not case.map.t2d[whole.argmax()]:
                continue
            z = case.head(output.depth)(output.readout[b, j - output.offset])
            p, log_q = case.map.restrict(whole).softmax(-1), z.log_softmax(-1)
            q = log_q.exp()
            f = case.map.restrict(whole.softmax(-1))
            label = int(case.map.to_draft[tokens[b, j]])
            hit += int(case.map.to_target(z.argmax()) == whole.argmax())
            values = {
                "soft_ce": -(p * log_q).sum(),
                "forward_kl": (p * (p.log() - log_q)).sum(),
                "ce": -log_q[label] if label >= 0 else 0.0 * z.sum(),
                "tv": 1 - torch.minimum(f, q).sum(),  # with full_target
                "neg_log_alpha": -torch.minimum(p, q).sum().log(),
            }
            for name in parts.keys() & values.keys():
                parts[name] = parts[name] + values[name]
        for term in config.terms:
            loss = loss + config.depth_weight(output.depth) * term.weight * parts[term.name] / mask.sum()
            sums[term.name].append(parts[term.name].detach())
        hits.append(hit)
        totals.append(int(mask.sum()))
    return loss, sums, hits, totals


def check(case: Case, config: LossConfig) -> None:
    got = case.run(config)
    loss, sums, hits, totals = dense(case, config)
    torch.testing.assert_close(got.loss, loss)
    for name, values in sums.items():
        torch.testing.assert_close(got.sums[name], torch.stack(values))
    assert got.correct.tolist() == hits and got.total.tolist() == totals
    with_hidden = [*case.leaves, *case.hiddens] if "smooth_l1" in sums else case.leaves
    want = torch.autograd.grad(loss, with_hidden, allow_unused=True)
    for g, w in zip(torch.autograd.grad(got.loss, with_hidden), want, strict=True):
        torch.testing.assert_close(g, torch.zeros_like(g) if w is None else w)


def terms(*given: dict[str, object], **rest: object) -> LossConfig:
    return LossConfig.model_validate({"terms": list(given), **rest})


MIXTURE = (
    {"name": "soft_ce", "weight": 0.5},
    {"name": "ce", "weight": 0.25},
    {"name": "tv", "full_target": True},
    {"name": "smooth_l1", "weight": 2.0},
)


@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 1024])
def test_equals_dense(chunk_rows: int) -> None:
    check(Case(), terms(*MIXTURE, chunk_rows=chunk_rows))


@pytest.mark.parametrize("name", ["soft_ce", "forward_kl", "ce", "neg_log_alpha"])
def test_single_terms(name: str) -> None:
    check(Case(), terms({"name": name}))


def test_full_vocabulary() -> None:
    check(Case(full=True), terms(*MIXTURE))


def test_heads_of_their_own_with_bias_scale_and_softcap() -> None:
    check(Case(shared=False, bias=True, softcap=2.0), terms(*MIXTURE, chunk_rows=5))


def test_draft_lm_reads_one_slot_before_the_label() -> None:
    check(Case(depths=1, full=True, offset=1), terms({"name": "forward_kl"}))


def test_exponential_decay() -> None:
    check(Case(), terms({"name": "soft_ce"}, depth_decay="exponential", decay=4.0))


def test_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafttrain.losses.fused.block_logits", lambda device: 3 * 19)
    check(Case(), terms(*MIXTURE, chunk_rows=12))


def test_top1_is_found_where_it_is_unknown() -> None:
    known, unknown = Case(), Case()
    unknown.batch = replace(unknown.batch, top1=None)
    a, b = known.run(terms(*MIXTURE)), unknown.run(terms(*MIXTURE))
    torch.testing.assert_close(a.loss, b.loss)
    assert torch.equal(a.correct, b.correct) and torch.equal(a.total, b.total)
    for x, y in zip(
        torch.autograd.grad(a.loss, known.leaves), torch.autograd.grad(b.loss, unknown.leaves), strict=True
    ):
        torch.testing.assert_close(x, y)


def test_labels_outside_the_draft_vocabulary_are_misses_without_loss() -> None:
    case = Case()
    outside = (~case.map.t2d).nonzero()[0]
    case.batch = replace(case.batch, top1=torch.full_like(case.batch.tokens, int(outside)))
    out = case.run(terms({"name": "soft_ce"}))
    assert float(out.loss.detach()) == 0.0 and out.correct.tolist() == [0, 0, 0] and out.total.tolist() == [11, 8, 5]
    assert all(not g.any() for g in torch.autograd.grad(out.loss, case.leaves))


def test_no_supervised_label_at_all() -> None:
    case = Case()
    case.batch = replace(case.batch, spans=torch.zeros_like(case.batch.spans))
    out = case.run(terms(*MIXTURE))
    assert float(out.loss.detach()) == 0.0 and out.total.tolist() == [0, 0, 0]
    assert all(not g.any() for g in torch.autograd.grad(out.loss, [*case.leaves, *case.hiddens]))


def test_frozen_head_gets_no_gradient() -> None:
    case = Case()
    case.weights = [w.detach() for w in case.weights]
    out = case.run(terms({"name": "soft_ce"}))
    reference, *_ = dense(case, terms({"name": "soft_ce"}))
    for g, w in zip(
        torch.autograd.grad(out.loss, case.readouts),
        torch.autograd.grad(reference, case.readouts),
        strict=True,
    ):
        torch.testing.assert_close(g, w)


def test_without_gradient_the_figures_are_the_same() -> None:
    case = Case()
    with torch.no_grad():
        out = case.run(terms(*MIXTURE))
    again = case.run(terms(*MIXTURE))
    assert not out.loss.requires_grad
    torch.testing.assert_close(out.loss, again.loss.detach())
    assert torch.equal(out.correct, again.correct)


def test_features_alone_still_count_hits() -> None:
    case = Case()
    check_sums = case.run(terms({"name": "smooth_l1"}))
    assert torch.equal(check_sums.correct, case.run(terms({"name": "soft_ce"})).correct)
    assert all(g.any() for g in torch.autograd.grad(check_sums.loss, case.hiddens))


@pytest.mark.parametrize("depth", [0, 2])
def test_a_detached_input_is_caught(depth: int) -> None:
    case = Case()
    case.readouts[depth] = case.readouts[depth].detach()
    with pytest.raises(ValueError, match=f"readout of depth {depth} was detached"):
        case.run(terms({"name": "ce"}))
    case = Case()
    case.hiddens[depth] = case.hiddens[depth].detach()
    with pytest.raises(ValueError, match=f"hidden of depth {depth} was detached"):
        case.run(terms({"name": "smooth_l1"}))


def test_refuses_depths_out_of_order_and_missing_features() -> None:
    case = Case()
    objective = Objective(terms({"name": "smooth_l1"}))
    counts = torch.ones(3)
    with pytest.raises(ValueError, match="output 0 is of depth 2"):
        objective(case.outputs[::-1], case.batch, case.head, case.target_head, case.map, counts)
    bare = [replace(output, hidden=None) for output in case.outputs]
    with pytest.raises(ValueError, match="predicts none"):
        objective(bare, case.batch, case.head, case.target_head, case.map, counts)


def test_second_backward_is_refused() -> None:
    case = Case()
    loss = case.run(terms({"name": "soft_ce"})).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        loss.backward()


def test_a_nan_feature_reaches_the_loss() -> None:
    case = Case()
    case.batch.features[Tap.final][0, 4] = float("nan")
    assert not case.run(terms({"name": "soft_ce"})).loss.isfinite()


class Widest(TorchDispatchMode):
    """The most rows of any tensor as wide as a vocabulary."""

    def __init__(self, widths: set[int]) -> None:
        super().__init__()
        self.widths, self.rows = widths, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] in self.widths and x.is_floating_point():
                self.rows = max(self.rows, x.shape[0])
        return out


@pytest.mark.parametrize("top1", [True, False])
def test_masked_rows_are_never_materialised(top1: bool) -> None:
    case = Case()
    if not top1:
        case.batch = replace(case.batch, top1=None)
    total = sum(case.run(terms(*MIXTURE)).total.tolist())
    assert case.batch.tokens.numel() == total == 24  # all depths together are as many rows as slots of one
    for chunk_rows, most in ((1024, total), (6, 6)):
        with Widest({V, case.map.size}) as widest:
            out = case.run(terms(*MIXTURE, chunk_rows=chunk_rows))
            torch.autograd.grad(out.loss, case.leaves)
        assert 0 < widest.rows <= most


def test_bf16_products_over_fp32_master_weights() -> None:
    exact, case = Case(dtype=torch.float32), Case(dtype=torch.float32)
    config = terms({"name": "soft_ce"})
    with torch.autocast("cpu", torch.bfloat16):
        out = case.run(config)
    want = exact.run(config)
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.loss, want.loss, rtol=2e-2, atol=2e-2)
    for g, w in zip(
        torch.autograd.grad(out.loss, case.leaves), torch.autograd.grad(want.loss, exact.leaves), strict=True
    ):
        assert g.dtype == torch.float32
        torch.testing.assert_close(g, w, rtol=5e-2, atol=5e-3)
