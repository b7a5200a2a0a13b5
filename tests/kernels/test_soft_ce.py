"""Cross-entropy of draft and target: the kernel against the definition, both against autograd, and in the objective."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.drafters.base import DepthOutput, DraftBatch
from drafttrain.losses import fused
from drafttrain.losses.config import LossConfig
from drafttrain.losses.objective import Objective
from drafttrain.modeling.head import Head
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.ops.soft_ce import soft_ce

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def logits(rows: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draft, target = (4 * torch.randn(rows, vocab, generator=generator) for _ in range(2))
    # The largest come late, so that sums are rescaled.
    draft[0, -1], target[0, -2] = 30.0, 40.0
    return draft.to(dtype), target.to(dtype)


@pytest.mark.parametrize("divergence", [False, True])
@pytest.mark.parametrize(
    ("vocab", "dtype"), [(37, torch.float32), (37, torch.bfloat16), (5000, torch.float16)], ids=str
)
def test_values_and_gradients(vocab: int, dtype: torch.dtype, divergence: bool, device: torch.device) -> None:
    draft, target = logits(3, vocab, dtype)
    leaf = draft.double().requires_grad_()
    p = target.double().softmax(-1)
    want = -(p * leaf.log_softmax(-1)).sum(-1) + (p * p.log()).sum(-1) * divergence
    (slope,) = torch.autograd.grad(want.sum(), leaf)
    for impl in ("triton", "reference"):
        out = draft.clone().to(device)
        value, top = soft_ce(out, target.to(device), divergence=divergence, weight=0.5, impl=impl)  # type: ignore[arg-type]
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(value.double().cpu(), want.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.double().cpu(), 0.5 * slope, rtol=tolerance, atol=tolerance / 4)
        assert torch.equal(top.cpu(), draft.argmax(-1))


def test_without_a_gradient_nothing_is_written(device: torch.device) -> None:
    draft, target = (x.to(device) for x in logits(2, 37, torch.float32))
    before = draft.clone()
    soft_ce(draft, target, gradient=False, impl="triton")
    assert torch.equal(draft, before)


def test_shapes_that_do_not_fit_are_refused() -> None:
    draft, target = logits(2, 37, torch.float32)
    with pytest.raises(ValueError, match="against"):
        soft_ce(draft, target[:1])
    with pytest.raises(ValueError, match="contiguous"):
        soft_ce(draft.t().contiguous().t(), target)


@pytest.mark.parametrize("name", ["soft_ce", "forward_kl"])
def test_the_objective_with_the_kernel(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss, gradients and counts are those of the terms in torch."""
    generator = torch.Generator().manual_seed(0)
    vocab_map = VocabMap.from_ids(torch.randperm(41, generator=generator)[:23], 41).to(device)
    spans = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1]])
    tokens = torch.randint(0, 41, spans.shape, generator=generator)
    final = torch.randn(*spans.shape, 8, generator=generator)
    states = [torch.randn(*spans.shape, 8, generator=generator) for _ in range(2)]
    weight, target = torch.randn(23, 8, generator=generator), torch.randn(41, 8, generator=generator)
    objective = Objective(LossConfig.model_validate({"terms": [{"name": name, "weight": 0.7}]}))
    used = []

    def run(kernel: bool) -> list[Tensor]:
        def choose(op: str, impl: str, *_: Any) -> bool:
            used.append(kernel)
            return kernel

        monkeypatch.setattr(fused, "use_triton", choose)
        leaves = [x.to(device).requires_grad_() for x in (*states, weight)]
        on = spans.to(device)
        batch = DraftBatch(tokens.to(device), on * 0, on * 0, on, {Tap.final: final.to(device)})
        outputs = [DepthOutput(k, k + 2, x) for k, x in enumerate(leaves[:-1])]
        out = objective(
            outputs, batch, lambda depth: Head(leaves[-1]), Head(target.to(device)), vocab_map,
            objective.counts(batch, 2),
        )  # fmt: skip
        return [x.double().cpu() for x in (out.loss.detach(), out.correct, *torch.autograd.grad(out.loss, leaves))]

    for got, want in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert set(used) == {True, False}
