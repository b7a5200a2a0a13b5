"""Each term against its formula, the gradient by autograd in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from drafttrain.losses.config import TermConfig
from drafttrain.losses.terms import Distribution, Rows, build_term

N, V = 7, 23
F64 = torch.float64


def kl(a: Tensor, b: Tensor) -> Tensor:
    return (a * (a / b).log()).sum(-1)


def alpha(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).sum(-1)


def mix(p: Tensor, q: Tensor, full: Tensor, eta: float) -> Tensor:
    weight = torch.exp(-eta * alpha(full, q)).detach()
    return weight * kl(p, q) + (1 - weight) * (1 - alpha(full, q))


def jsd(p: Tensor, q: Tensor, beta: float) -> Tensor:
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def top_k(p: Tensor, q: Tensor, k: int) -> Tensor:
    chosen = torch.zeros_like(p).scatter_(-1, p.topk(k, -1).indices, 1.0)
    return -(chosen * p * q.log()).sum(-1)


def hard(q: Tensor, y: Tensor) -> Tensor:
    return torch.stack([-q[n, label].log() if label >= 0 else q.new_zeros(()) for n, label in enumerate(y.tolist())])


# p is renormalised over the draft vocabulary, f = mass * p is not.
Formula = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
FORMULAS: list[tuple[dict[str, object], Formula]] = [
    ({"name": "forward_kl"}, lambda p, q, f, y: kl(p, q)),
    ({"name": "soft_ce"}, lambda p, q, f, y: -(p * q.log()).sum(-1)),
    ({"name": "reverse_kl"}, lambda p, q, f, y: kl(q, p)),
    ({"name": "ce"}, lambda p, q, f, y: hard(q, y)),
    ({"name": "jsd"}, lambda p, q, f, y: jsd(p, q, 0.5)),
    ({"name": "jsd", "beta": 0.1}, lambda p, q, f, y: jsd(p, q, 0.1)),
    ({"name": "tv"}, lambda p, q, f, y: 0.5 * (p - q).abs().sum(-1)),
    ({"name": "tv", "full_target": True}, lambda p, q, f, y: 1 - alpha(f, q)),
    ({"name": "neg_log_alpha"}, lambda p, q, f, y: -alpha(p, q).log()),
    ({"name": "neg_log_alpha", "full_target": True}, lambda p, q, f, y: -alpha(f, q).log()),
    ({"name": "lk"}, lambda p, q, f, y: mix(p, q, p, 3.0)),
    ({"name": "lk", "eta": 1.0, "full_target": True}, lambda p, q, f, y: mix(p, q, f, 1.0)),
    ({"name": "top_k_ce"}, lambda p, q, f, y: top_k(p, q, 10)),
    ({"name": "top_k_ce", "k": 2}, lambda p, q, f, y: top_k(p, q, 2)),
    ({"name": "top_k_ce", "k": 100}, lambda p, q, f, y: top_k(p, q, V)),
]


def make(dtype: torch.dtype = F64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    z, t = (2 * torch.randn(2, N, V, generator=gen, dtype=F64)).to(dtype)
    labels = torch.randint(0, V, (N,), generator=gen)
    labels[2] = -1
    mass = torch.rand(N, generator=gen, dtype=F64).to(dtype)
    return z, t, labels, mass


@pytest.mark.parametrize("config, formula", FORMULAS, ids=[str(c) for c, _ in FORMULAS])
def test_value_and_gradient(config: dict[str, object], formula: Formula) -> None:
    z, t, labels, mass = make()
    term = build_term(TypeAdapter(TermConfig).validate_python(config))
    rows = Rows(Distribution.of(z), Distribution.of(t), labels, mass)
    before = [x.clone() for x in (rows.draft.probs, rows.draft.logits, rows.p.probs, rows.p.logits)]
    value, gradient = term(rows)

    leaf = z.clone().requires_grad_()
    p = t.softmax(-1)
    want = formula(p, leaf.softmax(-1), mass[:, None] * p, labels)
    torch.testing.assert_close(value, want.detach())
    torch.testing.assert_close(gradient, torch.autograd.grad(want.sum(), leaf)[0])
    for x, y in zip(before, (rows.draft.probs, rows.draft.logits, rows.p.probs, rows.p.logits), strict=True):
        assert torch.equal(x, y)  # terms of one sum share them


@pytest.mark.parametrize("config, formula", FORMULAS, ids=[str(c) for c, _ in FORMULAS])
def test_extreme_logits_stay_finite(config: dict[str, object], formula: Formula) -> None:
    z, t, labels, mass = make(torch.float32)
    term = build_term(TypeAdapter(TermConfig).validate_python(config))
    for a, b in ((z * 200, t), (z, t * 200), (z * 200, t * 200), (z * 200, -z * 200)):
        value, gradient = term(Rows(Distribution.of(a), Distribution.of(b), labels, mass))
        assert value.isfinite().all() and gradient.isfinite().all()


def test_perfect_draft() -> None:
    _, t, labels, _ = make()
    rows = Rows(Distribution.of(t), Distribution.of(t), labels)
    for name in ("forward_kl", "reverse_kl", "jsd", "tv", "neg_log_alpha", "lk"):
        value, _ = build_term(TypeAdapter(TermConfig).validate_python({"name": name}))(rows)
        torch.testing.assert_close(value, torch.zeros(N, dtype=F64), rtol=0, atol=1e-12)


def test_a_nan_is_not_hidden() -> None:
    z, t, labels, mass = make()
    z[0, 0] = float("nan")
    rows = Rows(Distribution.of(z), Distribution.of(t), labels, mass)
    for config, _ in FORMULAS:
        value, _ = build_term(TypeAdapter(TermConfig).validate_python(config))(rows)
        assert not value[0].isfinite() and value[1:].isfinite().all(), config
