"""Bootstrap confidence intervals of pooled ratios.

Requests are resampled, not rounds, since the rounds of one request are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]
"""Lower and upper end of a 95 % percentile interval."""


def ratio_interval(
    numerator: Sequence[float], denominator: Sequence[float], *, samples: int = 2000, seed: int = 0
) -> Interval | None:
    """Interval of sum(numerator) / sum(denominator) over resampled requests.

    Args:
        numerator, denominator: one value a request, both of length N.
        samples: bootstrap resamples.
        seed: of the resampling; the result is a pure function of the arguments.

    Returns:
        None for fewer than two requests or when no resample has a positive denominator: there is no spread
        to show.
    """
    top, bottom = _pair(numerator, denominator)
    if len(top) < 2:
        return None
    weights = _weights(len(top), samples, seed)
    return _interval(weights @ top, weights @ bottom)


def chain_intervals(
    accepted: Sequence[Sequence[float]], reached: Sequence[Sequence[float]], *, samples: int = 2000, seed: int = 0
) -> list[Interval]:
    """Interval of 1 + a_1 + a_1 a_2 + ... up to each depth, requests resampled; a_i = accepted / reached at depth i.

    Args:
        accepted, reached: counts by request and depth, both [N, K].

    Returns:
        One interval a depth; [] for fewer than two requests. A depth that a resample never reached adds nothing to it.
    """
    top, bottom = np.asarray(accepted, dtype=np.float64), np.asarray(reached, dtype=np.float64)
    if len(top) < 2 or top.shape[1] == 0:
        return []
    weights = _weights(len(top), samples, seed)
    below = weights @ bottom
    alpha = np.divide(weights @ top, below, out=np.zeros_like(below), where=below > 0)
    lengths = 1 + np.cumprod(alpha, axis=1).cumsum(axis=1)
    low, high = np.quantile(lengths, [0.025, 0.975], axis=0)
    return [(float(a), float(b)) for a, b in zip(low, high, strict=True)]


def paired_speedup_interval(
    tokens: Sequence[float],
    seconds: Sequence[float],
    base_tokens: Sequence[float],
    base_seconds: Sequence[float],
    *,
    samples: int = 2000,
    seed: int = 0,
) -> Interval | None:
    """Interval of (sum tokens / sum seconds) / (sum base_tokens / sum base_seconds).

    The same request is drawn for both sides of a resample, so what makes a prompt easy or a machine slow
    cancels.

    Args:
        tokens, seconds, base_tokens, base_seconds: one value a request in the same order, length N.
    """
    top, bottom = _pair(tokens, seconds)
    base_top, base_bottom = _pair(base_tokens, base_seconds)
    if len(top) != len(base_top):
        raise ValueError(f"a paired bootstrap needs the same requests, got {len(top)} and {len(base_top)}")
    if len(top) < 2:
        return None
    weights = _weights(len(top), samples, seed)
    return _interval((weights @ top) * (weights @ base_bottom), (weights @ bottom) * (weights @ base_top))


def _pair(top: Sequence[float], bottom: Sequence[float]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    if len(top) != len(bottom):
        raise ValueError(f"numerator and denominator differ in length: {len(top)} and {len(bottom)}")
    return np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)


def _weights(requests: int, samples: int, seed: int) -> NDArray[np.float64]:
    """[samples, requests]: how often each request is drawn in each resample."""
    draws = np.random.default_rng(seed).multinomial(requests, np.full(requests, 1 / requests), size=samples)
    return draws.astype(np.float64)


def _interval(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> Interval | None:
    valid = bottom > 0
    if not valid.any():
        return None
    low, high = np.quantile(top[valid] / bottom[valid], [0.025, 0.975])
    return float(low), float(high)
