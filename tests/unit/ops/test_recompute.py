"""What the backward computes again: torch's own values and gradients, and nothing else kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from drafttrain.ops.packed_linear import pack
from drafttrain.ops.recompute import gated_linear, norm, normed_linear, rms_norm

EPS = 1e-5
ROWS, SIZE, OUT = (2, 5), 6, 3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
Part = Callable[..., Sequence[Tensor]]


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def _plain_gated(gate_up: Tensor, weight: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.linear(F.silu(gate) * up, weight)


# Name -> ours, torch's, sizes of the inputs.
PARTS: dict[str, tuple[Part, Part, list[tuple[int, ...]]]] = {
    "rms_norm": (
        lambda x, w: [rms_norm(x, w, EPS)],
        lambda x, w: [_plain_norm(x, w)],
        [(*ROWS, SIZE), (SIZE,)],
    ),
    "normed_linear": (
        lambda x, n, w: normed_linear(x, n, EPS, w),
        lambda x, n, w: (_plain_norm(x, n), F.linear(_plain_norm(x, n), w)),
        [(*ROWS, SIZE), (SIZE,), (OUT, SIZE)],
    ),
    "normed_linear, its product alone": (
        lambda x, n, w: [normed_linear(x, n, EPS, w)[1]],
        lambda x, n, w: [F.linear(_plain_norm(x, n), w)],
        [(*ROWS, SIZE), (SIZE,), (OUT, SIZE)],
    ),
    "gated_linear": (
        lambda x, w: [gated_linear(x, w)],
        lambda x, w: [_plain_gated(x, w)],
        [(*ROWS, 2 * SIZE), (OUT, SIZE)],
    ),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows in blocks of four."""
    monkeypatch.setattr(norm, "_BLOCK", 4 * SIZE)


def inputs_of(name: str, dtype: torch.dtype) -> list[Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=gen).to(dtype).requires_grad_() for size in PARTS[name][2]]


def run(part: Part, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of the inputs that want one, for random gradients of the outputs that have one."""
    outputs = list(part(*inputs))
    gen = torch.Generator().manual_seed(1)
    upstream = [torch.randn(out.shape, generator=gen).to(out.dtype) for out in outputs]
    live = [i for i, out in enumerate(outputs) if out.requires_grad]
    wanted = [x for x in inputs if x.requires_grad]
    return outputs, list(torch.autograd.grad([outputs[i] for i in live], wanted, [upstream[i] for i in live]))


def assert_equal_to_torch(name: str, inputs: Sequence[Tensor]) -> None:
    ours, theirs, _ = PARTS[name]
    outputs, grads = run(ours, inputs)
    expected, expected_grads = run(theirs, inputs)
    tolerance = TOLERANCE[inputs[0].dtype]
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    for x, y in zip(grads, expected_grads, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_equals_torch(name: str, dtype: torch.dtype) -> None:
    assert_equal_to_torch(name, inputs_of(name, dtype))


@pytest.mark.parametrize("name", PARTS)
def test_gradients_are_derivatives(name: str) -> None:
    assert torch.autograd.gradcheck(lambda *inputs: tuple(PARTS[name][0](*inputs)), inputs_of(name, torch.float64))


@pytest.mark.parametrize("name", PARTS)
def test_frozen_inputs(name: str) -> None:
    count = len(PARTS[name][2])
    for alone in range(count):
        inputs = [x.requires_grad_(i == alone) for i, x in enumerate(inputs_of(name, torch.float32))]
        assert_equal_to_torch(name, inputs)


@pytest.mark.parametrize("name", PARTS)
def test_rows_need_not_be_contiguous(name: str) -> None:
    first, *rest = inputs_of(name, torch.float32)
    assert_equal_to_torch(name, [first.detach().transpose(0, 1).requires_grad_(), *rest])


@pytest.mark.parametrize("name", PARTS)
def test_the_inputs_alone_are_kept(name: str) -> None:
    inputs = inputs_of(name, torch.bfloat16)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x):
        outputs = PARTS[name][0](*inputs)
    assert kept and outputs[0].requires_grad
    assert {x.untyped_storage().data_ptr() for x in kept} <= {x.untyped_storage().data_ptr() for x in inputs}


@pytest.mark.parametrize("name", PARTS)
def test_inside_gradient_checkpointing(name: str) -> None:
    inputs = inputs_of(name, torch.float32)
    part = PARTS[name][0]
    outputs, grads = run(lambda *x: checkpoint(part, *x, use_reentrant=False), inputs)
    expected, expected_grads = run(part, inputs)
    assert all(map(torch.equal, [*outputs, *grads], [*expected, *expected_grads]))


@pytest.mark.parametrize("name", PARTS)
def test_no_second_derivative_is_made_up(name: str) -> None:
    inputs = inputs_of(name, torch.float64)
    loss = sum(out.square().sum() for out in PARTS[name][0](*inputs))
    grads = torch.autograd.grad(loss, inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        sum(grad.sum() for grad in grads).backward()


@pytest.mark.parametrize("name", [name for name, (_, _, sizes) in PARTS.items() if sizes[-1] == (OUT, SIZE)])
def test_packed_weights(name: str) -> None:
    *inputs, weight = (x.detach() for x in inputs_of(name, torch.float32))
    packed = pack(weight)
    assert packed is not None
    for got, want in zip(PARTS[name][0](*inputs, packed), PARTS[name][1](*inputs, weight), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_both_ways_back_through_a_norm_are_one(dtype: torch.dtype) -> None:
    """By blocks on a CPU; by torch's kernel elsewhere."""
    x, weight = (x.detach() for x in inputs_of("rms_norm", dtype))
    grad = torch.randn_like(x)
    ways = [way(grad, x, weight, EPS) for way in (norm.backward_by_blocks, norm.backward_by_kernel)]
    for one, other in zip(*ways, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
