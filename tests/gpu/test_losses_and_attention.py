"""The CUDA paths of the unrolled attention and of the objective, against the same on the CPU."""

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
from drafttrain.ops.ttt_attention import ttt_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_flash_equals_reference(packed: bool, steps: int, dtype: torch.dtype) -> None:
    rows, heads, kv_heads, length, width = 2, 6, 2, 150, 64
    gen = torch.Generator().manual_seed(0)

    def draw(n: int) -> Tensor:
        return torch.randn(rows, n, length, width, generator=gen).to(dtype)

    inputs = [draw(heads)] + [draw(kv_heads) for _ in range(2 * (steps + 1))]
    grad = draw(heads)
    segments = torch.zeros(rows, length, dtype=torch.int64)
    if packed:
        segments[:, 70:] = 1
        segments[1, 100:] = 2

    def run(impl: str, device: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(device, dtype).requires_grad_() for x in inputs]
        out = ttt_attention(
            leaves[0], leaves[1 : steps + 2], leaves[steps + 2 :], segments.to(device), width**-0.5, impl=impl
        )
        return [x.double().cpu() for x in (out, *torch.autograd.grad(out, leaves, grad.to(device, dtype)))]

    for got, want in zip(run("flash", "cuda", dtype), run("reference", "cpu", torch.float64), strict=True):
        torch.testing.assert_close(got, want, rtol=3e-2, atol=3e-2)


def test_objective_equals_cpu() -> None:
    vocabulary, hidden, depths = 97, 16, 3
    gen = torch.Generator().manual_seed(0)
    vocab_map = VocabMap.from_ids(torch.randperm(vocabulary, generator=gen)[:50], vocabulary)
    spans = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1]])
    tokens = torch.randint(0, vocabulary, spans.shape, generator=gen)
    final = torch.randn(*spans.shape, hidden, generator=gen)
    states = [torch.randn(*spans.shape, hidden, generator=gen) for _ in range(depths)]
    weight, target = torch.randn(50, hidden, generator=gen), torch.randn(vocabulary, hidden, generator=gen)
    config = LossConfig.model_validate({"terms": [{"name": "lk", "full_target": True}, {"name": "smooth_l1"}]})

    def run(device: str) -> list[Tensor]:
        leaves = [x.to(device).requires_grad_() for x in (*states, weight)]
        on = {name: value.to(device) for name, value in {"tokens": tokens, "spans": spans}.items()}
        zeros = torch.zeros_like(on["spans"])
        batch = DraftBatch(on["tokens"], zeros, zeros, on["spans"], {Tap.final: final.to(device)})
        outputs = [DepthOutput(k, k + 2, x, x) for k, x in enumerate(leaves[:-1])]
        objective = Objective(config)
        out = objective(
            outputs, batch, lambda depth: Head(leaves[-1]), Head(target.to(device)), vocab_map,
            objective.counts(batch, depths),
        )  # fmt: skip
        grads = torch.autograd.grad(out.loss, leaves)
        return [x.double().cpu() for x in (out.loss.detach(), out.correct, out.total, *grads)]

    for got, want in zip(run("cuda"), run("cpu"), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)
