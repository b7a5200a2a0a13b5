"""Acceptance metrics with their intervals, from the counts of `engine.acceptance`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from drafttrain.bench.bootstrap import Interval, chain_intervals, ratio_interval
from drafttrain.engine.acceptance import acceptance_counts, chain_products, is_cut, tau
from drafttrain.engine.records import RoundRecord


@dataclass(frozen=True)
class Acceptance:
    """How a draft did over a set of rounds.

    Attributes:
        rounds, emitted: totals; the token that the prefill gives is in neither.
        tau: emitted / rounds, pooled, bonus token included; None without rounds.
        tau_ci: 95 % bootstrap interval over requests.
        tau_request_mean: mean over requests of the request's own tau.
        alpha: alpha[i-1] = P(depth i accepted | depth i-1 accepted); None where no round reached that depth.
        per_position: P(depth i accepted) over the rounds that proposed it, what vLLM calls per-position.
        judged: judged[i-1], rounds in which depth i was judged given depth i-1: the denominators of alpha.
        acceptance_rate: accepted / proposed, of trees accepted / levels proposed; None when nothing was.
        mean_accepted: accepted draft tokens a round.
        cut_rounds: rounds that ended inside the accepted prefix.
        chain_ci: 95 % bootstrap intervals of `chain` over requests; [] for fewer than two requests.
    """

    rounds: int
    emitted: int
    tau: float | None
    tau_ci: Interval | None
    tau_request_mean: float | None
    alpha: list[float | None]
    per_position: list[float | None]
    judged: list[int]
    acceptance_rate: float | None
    mean_accepted: float | None
    cut_rounds: int
    chain_ci: list[Interval] = field(default_factory=list)

    @property
    def chain(self) -> list[float]:
        """chain[i-1] = 1 + alpha_1 + alpha_1 alpha_2 + ... up to depth i: tokens a round where every round drafts i
        tokens and none is cut, which is what a server counts. tau is less where answers end soon."""
        return [1 + total for total in accumulate(chain_products(self.alpha))]


def acceptance(records: Sequence[RoundRecord], *, samples: int = 2000, seed: int = 0) -> Acceptance:
    """All acceptance metrics of `records`.

    Args:
        records: rounds of any number of requests and turns, in any order.
        samples, seed: of the bootstrap.
    """
    accepted, reached, offered = acceptance_counts(records)
    requests = by_request(records)
    emitted = [sum(r.emitted for r in rows) for rows in requests.values()]
    rounds = [len(rows) for rows in requests.values()]
    proposed = sum(offered)
    return Acceptance(
        rounds=len(records),
        emitted=sum(emitted),
        tau=tau(records),
        tau_ci=ratio_interval(emitted, rounds, samples=samples, seed=seed),
        tau_request_mean=sum(e / n for e, n in zip(emitted, rounds, strict=True)) / len(rounds) if rounds else None,
        alpha=[_ratio(a, n) for a, n in zip(accepted, reached, strict=True)],
        per_position=[_ratio(a, n) for a, n in zip(accepted, offered, strict=True)],
        judged=reached,
        acceptance_rate=_ratio(sum(accepted), proposed),
        mean_accepted=_ratio(sum(accepted), len(records)),
        cut_rounds=sum(is_cut(r) for r in records),
        chain_ci=_chain_intervals(list(requests.values()), len(accepted), samples, seed),
    )


def _chain_intervals(requests: Sequence[Sequence[RoundRecord]], depths: int, samples: int, seed: int) -> list[Interval]:
    counts = [acceptance_counts(rows)[:2] for rows in requests]
    accepted, reached = ([one[side] + [0] * (depths - len(one[side])) for one in counts] for side in (0, 1))
    return chain_intervals(accepted, reached, samples=samples, seed=seed)


def by_request(records: Iterable[RoundRecord]) -> dict[str, list[RoundRecord]]:
    """Records of each request, all turns together: the unit of resampling."""
    groups: dict[str, list[RoundRecord]] = defaultdict(list)
    for record in records:
        groups[record.request].append(record)
    return dict(groups)


def by_category(records: Iterable[RoundRecord], category_of: Mapping[str, str]) -> dict[str, list[RoundRecord]]:
    """Records of each category, in the order of `category_of` (request id -> category)."""
    groups: dict[str, list[RoundRecord]] = {category: [] for category in category_of.values()}
    for record in records:
        groups[category_of[record.request]].append(record)
    return {category: rows for category, rows in groups.items() if rows}


def _ratio(top: int, bottom: int) -> float | None:
    return top / bottom if bottom else None
