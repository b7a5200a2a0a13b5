"""What a server's counters should show, from what was measured of a draft; in each engine's own definition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from drafttrain.engine.acceptance import chain_products
from drafttrain.export.measured import Measurement

VLLM_LENGTH, VLLM_POSITIONS = "mean acceptance length", "per-position acceptance rate"


@dataclass(frozen=True)
class SpeedUp:
    """Of one measured batch size: over the bundled engine without drafting, at the same setting."""

    batch: int
    k: int
    speedup: float
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Forecast:
    """Expected acceptance of chains of `k` draft tokens.

    Attributes:
        source: where the figures come from.
        k: draft tokens a round.
        conditional: P(depth i accepted | depth i-1 accepted), depths from 1; None where never reached.
        unconditional: P(depth i accepted) over all rounds: the product of the conditional ones up to i.
        length: expected tokens a round, the target's own included: 1 + sum of `unconditional`.
        length_interval: 95 % of `length`, by the same estimator, over resampled requests. tau is another one: it is
            less where answers end soon, since the engine drafts and counts no further than their end.
        rate: expected accepted / proposed tokens.
        speedups: where they were measured.
    """

    source: str
    k: int
    conditional: list[float | None]
    unconditional: list[float]
    length: float
    length_interval: tuple[float, float] | None
    rate: float
    speedups: list[SpeedUp]

    def counters(self, engine: str) -> dict[str, Any]:
        """Name of a counter, as the engine reports it -> what it should show; {} for engines without any."""
        length, rate = round(self.length, 3), round(self.rate, 4)
        positions = [round(p, 4) for p in self.unconditional]
        match engine:
            case "vllm" | "speculators":
                # 1 + accepted / drafts, accepted at i / drafts, accepted / draft tokens.
                return {VLLM_LENGTH: length, VLLM_POSITIONS: positions, "draft acceptance rate": rate}
            case "sglang":
                # Completion tokens / verify calls; its rate depends on the shape of its tree.
                return {"accept length": length}
            case "trtllm":
                return {"acceptance length": length, "acceptance rate": rate}
        return {}

    def to_json(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def forecast(rows: Sequence[Measurement], in_training: Mapping[str, Any] | None, k: int) -> Forecast | None:
    """What to expect of `k` draft tokens a round, or None where nothing was measured.

    The rates of a chain's first depths do not depend on how many follow, so that a measurement at another length
    serves, too; depths behind those that were measured are not guessed: `k` is cut to them.

    Args:
        rows: of evaluations; greedy ones and those with as many draft tokens are preferred.
        in_training: the best measurement on held-out prompts, for a draft that was never evaluated.
        k: draft tokens a round.
    """
    best = min(rows, key=lambda row: (row.temperature != 0.0, row.k < k, abs(row.k - k), row.batch), default=None)
    if best is not None:
        source = f"suite {best.suite}, T={best.temperature:g}, K={best.k}, batch {best.batch}, {best.date[:10]}"
        return _of(best.alpha, best.per_position, k, source, best.chain_ci, _speedups(rows, best))
    if in_training is not None and in_training.get("alpha"):
        source = f"held-out prompts while training, T=0, K={in_training['k']}: like those it was trained on"
        rates = list(in_training["alpha"])
        # Training notes 0 for depths that no round reached, too.
        reached = rates.index(0.0) + 1 if 0.0 in rates else len(rates)
        return _of([*rates[:reached], *[None] * (len(rates) - reached)], None, k, source, [], [])
    return None


def _of(
    alpha: Sequence[float | None],
    measured: Sequence[float | None] | None,
    k: int,
    source: str,
    intervals: Sequence[tuple[float, float]],
    speedups: list[SpeedUp],
) -> Forecast | None:
    """From the conditional rates, or the measured unconditional ones where only those are known."""
    conditional = list(alpha[:k])
    products = chain_products(conditional)
    if not products and measured is not None:
        products = [0.0 if p is None else p for p in measured[:k]]
    if not products:
        return None
    depths = len(products)
    total = sum(products)
    interval = intervals[depths - 1] if depths <= len(intervals) else None
    return Forecast(source, depths, conditional, products, 1 + total, interval, total / depths, speedups)


def _speedups(rows: Iterable[Measurement], best: Measurement) -> list[SpeedUp]:
    """Of the batch sizes measured in the same suite, temperature and number of draft tokens."""
    alike = [
        row
        for row in rows
        if row.speedup is not None and (row.suite, row.temperature, row.k) == (best.suite, best.temperature, best.k)
    ]
    return [
        SpeedUp(row.batch, row.k, row.speedup, row.speedup_ci)
        for row in sorted(alike, key=lambda row: row.batch)
        if row.speedup is not None
    ]


def describe(found: Forecast, engine: str) -> list[str]:
    """Lines for terminal and card: the one number first."""
    interval = "" if found.length_interval is None else " [{:.2f}, {:.2f}]".format(*found.length_interval)
    positions = " / ".join(f"{p:.2f}" for p in found.unconditional)
    conditional = " / ".join("-" if a is None else f"{a:.2f}" for a in found.conditional)
    lines = [
        f"expect {found.length:.2f}{interval} tokens a round with {found.k} draft tokens ({found.source})",
        f"accepted at each depth: {positions} of all rounds; {conditional} of those that reached it",
    ]
    counters = found.counters(engine)
    if counters:
        shown = ", ".join(f"{name} {_shown(value)}" for name, value in counters.items())
        lines.append(f"the server's own counters should show: {shown}")
    for speed in found.speedups:
        ci = "" if speed.interval is None else " [{:.2f}, {:.2f}]".format(*speed.interval)
        lines.append(f"speed-up at batch {speed.batch}: {speed.speedup:.2f}{ci} in drafttrain's own engine")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " / ".join(f"{item:.3f}" for item in value)
    return f"{value:.3f}"
