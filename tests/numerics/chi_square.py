"""The test that a sample follows a distribution, and the settings in which verifiers are tested."""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.engine.sampling import SamplingParams

VOCAB = 16


def critical(freedom: int) -> float:
    """99.9 % point of chi-square (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + 3.0902 * spread**0.5) ** 3)


SETTINGS = {
    "temperature": SamplingParams(temperature=0.7, seed=3),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8, seed=4),
    "top_k": SamplingParams(temperature=1.0, top_k=9, seed=5),
}


def chi_square(tokens: Tensor, p: Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom of tokens [n] against p [V]."""
    expected = p.double() * len(tokens)
    observed = torch.bincount(tokens, minlength=VOCAB).double()
    inside = expected > 0
    assert observed[~inside].sum() == 0, "a token of probability zero was emitted"
    statistic = ((observed - expected)[inside] ** 2 / expected[inside]).sum()
    return float(statistic), int(inside.sum()) - 1


def assert_follows(tokens: Tensor, p: Tensor) -> None:
    """Fail where tokens [n] do not come from p [V]."""
    statistic, freedom = chi_square(tokens, p)
    assert statistic < critical(freedom), f"chi-square {statistic:.1f} at {freedom} degrees of freedom"
