"""Each implementation against the definition, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafttrain.ops.ttt_attention import SegmentLayout, ttt_attention

Shape = tuple[int, int, int, int, int]
# heads: query, key. lengths: odd, below and above the kernel's tile of 32 queries.
SHAPES = [(1, 1, 1, 1, 8), (2, 4, 4, 33, 16), (2, 6, 2, 70, 8), (3, 9, 3, 40, 64)]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}


def make(shape: Shape, steps: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    rows, heads, kv_heads, length, width = shape
    gen = torch.Generator().manual_seed(seed)

    def draw(n: int) -> Tensor:
        return torch.randn(rows, n, length, width, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()

    return draw(heads), [draw(kv_heads) for _ in range(steps + 1)], [draw(kv_heads) for _ in range(steps + 1)]


def run(
    impl: str,
    shape: Shape,
    steps: int,
    dtype: torch.dtype,
    segments: Tensor | None = None,
) -> list[Tensor]:
    """Output and gradients in fp64; inputs are rounded to `dtype` first, so that only arithmetic differs."""
    q, ks, vs = make(shape, steps, dtype)
    if impl == "reference":
        q, ks, vs = (
            q.detach().double().requires_grad_(),
            [k.detach().double().requires_grad_() for k in ks],
            [v.detach().double().requires_grad_() for v in vs],
        )
    out = ttt_attention(q, ks, vs, segments, shape[-1] ** -0.5, impl=impl)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    real = torch.ones(out.shape[0], out.shape[2], dtype=torch.bool) if segments is None else segments >= 0
    grad = grad * real[:, None, :, None]  # the loss never reaches padding
    grads = torch.autograd.grad(out, [q, *ks, *vs], grad.to(out.dtype))
    assert all(g.isfinite().all() for g in grads) and out.isfinite().all()
    return [(out * real[:, None, :, None]).double(), *(g.double() for g in grads)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flash_equals_reference(shape: Shape, steps: int, dtype: torch.dtype) -> None:
    for got, want in zip(run("flash", shape, steps, dtype), run("reference", shape, steps, dtype), strict=True):
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


SEGMENTS = {
    "padded": [[0] * 20 + [-1] * 13, [0] * 33],
    "packed": [[0] * 7 + [1] * 1 + [2] * 25, [0] * 17 + [1] * 10 + [-1] * 6],
    "all padding": [[-1] * 33, [0] * 30 + [1] * 3],
    "left padded": [[-1] * 5 + [0] * 28, [0] * 33],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("case", SEGMENTS)
def test_documents_do_not_see_each_other(case: str, steps: int, dtype: torch.dtype) -> None:
    segments = torch.tensor(SEGMENTS[case])
    shape = (2, 4, 2, 33, 16)
    got, want = run("flash", shape, steps, dtype, segments), run("reference", shape, steps, dtype, segments)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("impl", ["reference", "flash"])
def test_packed_equals_one_document_a_row(impl: str) -> None:
    q, ks, vs = make((1, 4, 2, 24, 8), 2, torch.float64)
    packed = ttt_attention(q, ks, vs, torch.tensor([[5] * 10 + [7] * 14]), 0.3, impl=impl)
    for part in (slice(0, 10), slice(10, 24)):
        alone = ttt_attention(
            q[:, :, part],
            [k[:, :, part] for k in ks],
            [v[:, :, part] for v in vs],
            None,
            0.3,
            impl=impl,
        )
        torch.testing.assert_close(packed[:, :, part], alone)


def test_reference_is_the_definition() -> None:
    q, ks, vs = make((1, 2, 1, 5, 4), 2, torch.float64)
    out = ttt_attention(q, ks, vs, None, 0.7, impl="reference")
    for t in range(5):
        for h in range(2):
            keys = torch.cat([ks[0][0, 0, : t + 1], ks[1][0, 0, t : t + 1], ks[2][0, 0, t : t + 1]])
            values = torch.cat([vs[0][0, 0, : t + 1], vs[1][0, 0, t : t + 1], vs[2][0, 0, t : t + 1]])
            want = (0.7 * keys @ q[0, h, t]).softmax(0) @ values
            torch.testing.assert_close(out[0, h, t], want)


def test_gradcheck() -> None:
    q, ks, vs = make((1, 2, 1, 6, 8), 2, torch.float64)
    segments = torch.tensor([[0, 0, 0, 1, 1, -1]])

    def f(q: Tensor, *rest: Tensor) -> Tensor:
        return ttt_attention(q, rest[:3], rest[3:], segments, 0.4, impl="flash")

    assert torch.autograd.gradcheck(f, (q, *ks, *vs))


def test_extreme_scores_stay_finite() -> None:
    q, ks, vs = make((1, 2, 2, 40, 16), 3, torch.float32)
    out = ttt_attention(q * 300, ks, vs, None, 1.0)
    grads = torch.autograd.grad(out.sum(), [q, *ks, *vs])
    assert out.isfinite().all() and all(g.isfinite().all() for g in grads)


def test_autocast_gives_its_dtype() -> None:
    q, ks, vs = make((1, 2, 2, 8, 8), 1, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = ttt_attention(q, ks, vs, None, 0.3)
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32


def test_layout() -> None:
    layout = SegmentLayout.of(torch.tensor([[0, 0, 1, -1], [0, 0, 0, 0]]))
    assert layout.runs == ((0, 0, 2), (0, 2, 3), (0, 3, 4), (1, 0, 4))
    assert not layout.single and layout.longest == 4
    assert layout.cumulative_lengths(torch.device("cpu")).tolist() == [0, 2, 3, 4, 8]
    assert SegmentLayout.of(torch.tensor([[0, 0, -1], [-1, -1, -1], [4, 4, 4]])).single
    assert not SegmentLayout.of(torch.tensor([[-1, 0, 0]])).single


def test_refusals() -> None:
    q, ks, vs = make((1, 3, 2, 4, 8), 0, torch.float32)
    with pytest.raises(ValueError, match="do not divide"):
        ttt_attention(q, ks, vs, None, 1.0)
    with pytest.raises(ValueError, match="as many keys"):
        ttt_attention(q, ks, [], None, 1.0)
    with pytest.raises(ValueError, match="no flash kernel"):
        ttt_attention(q.to("meta"), [ks[0][:, :1].to("meta")], [vs[0][:, :1].to("meta")], None, 1.0, impl="flash")
