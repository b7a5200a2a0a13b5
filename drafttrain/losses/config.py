"""The `loss` section of a recipe."""

from __future__ import annotations

from math import exp
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from drafttrain.config import Config


class PlainTerm(Config):
    """A divergence between the target's distribution p, restricted to the draft vocabulary, and the draft's
    q.

    `forward_kl` KL(p||q); `soft_ce` the same up to the entropy of p; `reverse_kl` KL(q||p); `ce`
    cross-entropy to the tokens of the corpus.
    """

    name: Literal["forward_kl", "soft_ce", "reverse_kl", "ce"]
    weight: PositiveFloat = 1.0


class JensenShannonTerm(Config):
    """beta KL(p||m) + (1 - beta) KL(q||m) with m = beta p + (1 - beta) q (DistillSpec, arXiv 2310.08461)."""

    name: Literal["jsd"]
    weight: PositiveFloat = 1.0
    beta: float = Field(0.5, gt=0.0, lt=1.0)


class AcceptanceTerm(Config):
    """Terms on the acceptance rate alpha = sum min(p, q): `tv` is 1 - alpha, `neg_log_alpha` -log alpha.

    With `full_target`, p is not renormalised over the draft vocabulary, so alpha is the rate that a verifier
    sees. It costs one more pass of the target's whole head over the supervised rows.
    """

    name: Literal["tv", "neg_log_alpha"]
    weight: PositiveFloat = 1.0
    full_target: bool = False


class HybridTerm(Config):
    """lambda KL(p||q) + (1 - lambda) TV, lambda = exp(-eta alpha) of the row, detached (arXiv 2602.23881)."""

    name: Literal["lk"]
    weight: PositiveFloat = 1.0
    eta: NonNegativeFloat = 3.0
    full_target: bool = False


class TopKTerm(Config):
    """Cross-entropy over the target's k most probable tokens alone (HASS, arXiv 2408.15766)."""

    name: Literal["top_k_ce"]
    weight: PositiveFloat = 1.0
    k: PositiveInt = 10


class FeatureTerm(Config):
    """SmoothL1 between predicted and true final features, mean over the width (EAGLE, arXiv 2401.15077)."""

    name: Literal["smooth_l1"]
    weight: PositiveFloat = 1.0
    beta: PositiveFloat = 1.0


VocabularyTerm = PlainTerm | JensenShannonTerm | AcceptanceTerm | HybridTerm | TopKTerm
TermConfig = Annotated[VocabularyTerm | FeatureTerm, Field(discriminator="name")]


class LossConfig(Config):
    """Weighted terms, summed over depths.

    Attributes:
        terms: each name at most once.
        depth_decay: weight of depth k: "geometric" decay^k, "exponential" exp(-k / decay).
        decay: at most 1 when geometric.
        chunk_rows: rows of logits that exist at a time; fewer where the vocabulary is large.
    """

    terms: tuple[TermConfig, ...] = (PlainTerm(name="soft_ce"),)
    depth_decay: Literal["geometric", "exponential"] = "geometric"
    decay: PositiveFloat = 0.8
    chunk_rows: PositiveInt = 1024

    @field_validator("terms")
    @classmethod
    def _distinct(cls, terms: tuple[TermConfig, ...]) -> tuple[TermConfig, ...]:
        names = [term.name for term in terms]
        if not names:
            raise ValueError("a loss needs at least one term")
        if len(set(names)) < len(names):
            raise ValueError(f"each term at most once, got {', '.join(names)}")
        return terms

    @model_validator(mode="after")
    def _decays(self) -> LossConfig:
        if self.depth_decay == "geometric" and self.decay > 1.0:
            raise ValueError(f"geometric decay is at most 1, got {self.decay:g}")
        return self

    def depth_weight(self, depth: int) -> float:
        """w_k of depth k, from 0."""
        return float(self.decay**depth) if self.depth_decay == "geometric" else exp(-depth / self.decay)
