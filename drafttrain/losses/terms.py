"""The terms over a vocabulary: value and gradient of each in closed form.

Legend: N rows, V draft vocabulary, z and t logits of draft and target [N, V], q = softmax(z), p = softmax(t)
(so p is the target restricted to the draft vocabulary and renormalised, as in EAGLE-3, arXiv 2503.01840), all
in fp32 at least.

For a loss L(q), dL/dz = q (g - q.g) with g = dL/dq. Each term returns (value [N], gradient [N, V]); the
gradient is the caller's to overwrite, the inputs are not written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import log

import torch
from torch import Tensor

from drafttrain.losses.config import (
    AcceptanceTerm,
    HybridTerm,
    JensenShannonTerm,
    PlainTerm,
    TopKTerm,
    VocabularyTerm,
)


@dataclass(frozen=True)
class Distribution:
    """A softmax and its parts.

    Attributes:
        logits: [N, V].
        probs: [N, V].
        lse: [N], log-sum-exp of the logits.
        top: [N], the most probable id.
    """

    logits: Tensor
    probs: Tensor
    lse: Tensor
    top: Tensor

    @staticmethod
    def of(logits: Tensor) -> Distribution:
        """From logits [N, V]."""
        highest, top = logits.max(-1)
        probs = logits.softmax(-1)
        # p_top >= 1/V, so this is exact where a second sum of exponentials would cost a pass.
        lse = highest - probs.gather(-1, top[:, None])[:, 0].log()
        return Distribution(logits, probs, lse, top)

    def first(self, n: int) -> Distribution:
        """The first n rows, as views."""
        return Distribution(self.logits[:n], self.probs[:n], self.lse[:n], self.top[:n])


@dataclass(frozen=True)
class Rows:
    """What a term sees.

    Attributes:
        draft: q.
        target: p, or None if no term reads it.
        labels: int64 [N], draft ids of the corpus' tokens, -1 outside the draft vocabulary.
        mass: [N], the target's probability of the draft vocabulary, or None if no term reads it.
    """

    draft: Distribution
    target: Distribution | None
    labels: Tensor
    mass: Tensor | None = None

    @property
    def p(self) -> Distribution:
        """The target, which must be there."""
        assert self.target is not None, "this term reads the target's distribution"
        return self.target


Term = Callable[[Rows], tuple[Tensor, Tensor]]


def soft_cross_entropy(rows: Rows) -> tuple[Tensor, Tensor]:
    """-sum p log q; gradient q - p."""
    q, p = rows.draft, rows.p
    return q.lse - (p.probs * q.logits).sum(-1), q.probs - p.probs


def forward_kl(rows: Rows) -> tuple[Tensor, Tensor]:
    """KL(p||q) = sum p log(p/q); gradient q - p."""
    q, p = rows.draft, rows.p
    return (p.probs * (p.logits - q.logits)).sum(-1) + q.lse - p.lse, q.probs - p.probs


def reverse_kl(rows: Rows) -> tuple[Tensor, Tensor]:
    """KL(q||p) = sum q log(q/p); gradient q (log(q/p) - KL)."""
    q, p = rows.draft, rows.p
    gap = q.logits - p.logits
    mean = (q.probs * gap).sum(-1)
    return mean - q.lse + p.lse, gap.sub_(mean[:, None]).mul_(q.probs)


def jensen_shannon(rows: Rows, beta: float) -> tuple[Tensor, Tensor]:
    """beta KL(p||m) + (1 - beta) KL(q||m), m = beta p + (1 - beta) q; dL/dq = (1 - beta) log(q/m)."""
    q, p = rows.draft, rows.p
    log_q, log_p = q.logits - q.lse[:, None], p.logits - p.lse[:, None]
    log_m = torch.logaddexp(log_q + log(1 - beta), log_p + log(beta))
    p_part = (p.probs * log_p.sub_(log_m)).sum(-1)
    gap = log_q.sub_(log_m)
    q_part = (q.probs * gap).sum(-1)
    gradient = gap.sub_(q_part[:, None]).mul_(q.probs).mul_(1 - beta)
    return beta * p_part + (1 - beta) * q_part, gradient


def cross_entropy(rows: Rows) -> tuple[Tensor, Tensor]:
    """-log q(label); gradient q - onehot. Rows whose label the draft cannot say give nothing."""
    q = rows.draft
    inside = rows.labels >= 0
    index = rows.labels.clamp(min=0)[:, None]
    value = torch.where(inside, q.lse - q.logits.gather(-1, index)[:, 0], 0.0)
    gradient = q.probs.clone()
    gradient.scatter_add_(-1, index, gradient.new_full(index.shape, -1.0))
    return value, gradient.masked_fill_(~inside[:, None], 0.0)


def _overlap(rows: Rows, full_target: bool) -> tuple[Tensor, Tensor]:
    """alpha = sum min(p, q) [N], and d alpha/dz = q (1[q < p] - sum q 1[q < p]) [N, V]."""
    q, p = rows.draft.probs, rows.p.probs
    if full_target:
        assert rows.mass is not None, "full_target reads the target's mass on the draft vocabulary"
        p = p * rows.mass[:, None]
    alpha = torch.minimum(p, q).sum(-1)
    below = torch.where(q < p, q, 0.0)
    return alpha, below.addcmul_(q, below.sum(-1, keepdim=True), value=-1.0)


def total_variation(rows: Rows, full_target: bool) -> tuple[Tensor, Tensor]:
    """TV(p, q) = 1 - alpha: the probability that the drafted token is rejected (arXiv 2302.01318)."""
    alpha, gradient = _overlap(rows, full_target)
    return 1.0 - alpha, gradient.neg_()


def negative_log_acceptance(rows: Rows, full_target: bool) -> tuple[Tensor, Tensor]:
    """-log alpha: the direction of TV with its gradient divided by alpha (arXiv 2602.23881)."""
    alpha, gradient = _overlap(rows, full_target)
    alpha = alpha.clamp(min=torch.finfo(alpha.dtype).tiny)
    return -alpha.log(), gradient.div_(-alpha[:, None])


def lk_hybrid(rows: Rows, eta: float, full_target: bool) -> tuple[Tensor, Tensor]:
    """lambda KL(p||q) + (1 - lambda) TV, lambda = exp(-eta alpha) without gradient (arXiv 2602.23881).

    lambda is each row's own: a mean over the batch would make the gradient depend on how rows are batched.
    """
    kl, gradient = forward_kl(rows)
    alpha, overlap = _overlap(rows, full_target)
    mix = torch.exp(-eta * alpha)
    gradient.mul_(mix[:, None]).addcmul_(overlap, (1.0 - mix)[:, None], value=-1.0)
    return mix * kl + (1.0 - mix) * (1.0 - alpha), gradient


def top_k_cross_entropy(rows: Rows, k: int) -> tuple[Tensor, Tensor]:
    """-sum over the k likeliest of p log q (HASS, arXiv 2408.15766); gradient q sum_k p - p 1[top k]."""
    q, p = rows.draft, rows.p
    weights, index = p.probs.topk(min(k, p.probs.shape[-1]), dim=-1)
    value = (weights * (q.lse[:, None] - q.logits.gather(-1, index))).sum(-1)
    gradient = q.probs * weights.sum(-1, keepdim=True)
    return value, gradient.scatter_add_(-1, index, -weights)


def build_term(config: VocabularyTerm) -> Term:
    """The function of a configured term."""
    if isinstance(config, JensenShannonTerm):
        return partial(jensen_shannon, beta=config.beta)
    if isinstance(config, TopKTerm):
        return partial(top_k_cross_entropy, k=config.k)
    if isinstance(config, HybridTerm):
        return partial(lk_hybrid, eta=config.eta, full_target=config.full_target)
    if isinstance(config, AcceptanceTerm):
        chosen = total_variation if config.name == "tv" else negative_log_acceptance
        return partial(chosen, full_target=config.full_target)
    plain: dict[str, Term] = {
        "forward_kl": forward_kl,
        "soft_ce": soft_cross_entropy,
        "reverse_kl": reverse_kl,
        "ce": cross_entropy,
    }
    return plain[config.name]


def reads_target(config: VocabularyTerm) -> bool:
    """Whether the term needs the target's logits."""
    return config.name != "ce"


def reads_mass(config: VocabularyTerm) -> bool:
    """Whether the term needs the target's logits over its whole vocabulary."""
    return isinstance(config, AcceptanceTerm | HybridTerm) and config.full_target


__all__ = ["Distribution", "PlainTerm", "Rows", "Term", "build_term", "reads_mass", "reads_target"]
