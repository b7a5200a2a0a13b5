"""A cost model of decoding: seconds of a round by its size, fitted to the timings of one evaluation.

    plain(rows)                = a + b rows
    verify(rows, width)        = c + d rows + e rows width
    draft(rows, steps)         = f + g rows + h steps + i rows steps
    host(rows)                 = j + l rows
    speed-up(rows, draft)      = tau plain(rows) / (draft + verify + host)

No coefficient is negative. Each draft has coefficients of its own: what it reads of the target and how it is verified
differ. A machine may be slower while one setting is measured than during the next; the baseline of each setting was run
in turns with its drafts, so their times are taken relative to it. The model holds for the machine, target and engine
that were timed and for nothing else.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from drafttrain.bench.result import BASELINE, DraftResult, EvalResult, Setting
from drafttrain.bench.rounds import RoundTime

Coefficients = tuple[float, ...]
# Weight of differences between settings against those within: enough to decide where nothing else does.
_ALIKE = 0.01


@dataclass(frozen=True)
class RoundCost:
    """Coefficients of the rounds of one draft, in seconds; see the module.

    Attributes:
        verify: of 1, rows, rows x width.
        draft: of 1, rows, steps, rows x steps.
        host: of 1, rows.
        rows, widths: smallest and largest that were timed.
    """

    verify: Coefficients
    draft: Coefficients
    host: Coefficients
    rows: tuple[int, int]
    widths: tuple[int, int]

    @staticmethod
    def fit(timings: Sequence[RoundTime]) -> RoundCost:
        """From rounds of different sizes; at least one."""
        weights = [t.rounds for t in timings]
        return RoundCost(
            verify=fit([_verify(t.rows, t.width) for t in timings], [t.verify_s for t in timings], weights),
            draft=fit([_draft(t.rows, t.steps) for t in timings], [t.draft_s for t in timings], weights),
            host=fit([(1, t.rows) for t in timings], [t.host_s for t in timings], weights),
            rows=(min(t.rows for t in timings), max(t.rows for t in timings)),
            widths=(min(t.width for t in timings), max(t.width for t in timings)),
        )

    def seconds(self, rows: float, width: float, steps: float) -> float:
        """Of a round of `rows` requests with `width` tokens each in the target's forward, drafted in `steps` steps."""
        return (
            _dot(self.verify, _verify(rows, width)) + _dot(self.draft, _draft(rows, steps)) + _dot(self.host, (1, rows))
        )

    def covers(self, rows: int, width: int) -> bool:
        """Whether a size lies between those that were timed."""
        return self.rows[0] <= rows <= self.rows[1] and self.widths[0] <= width <= self.widths[1]


@dataclass(frozen=True)
class Prediction:
    """What the model says of a setting that was measured.

    Attributes:
        predicted, measured: speed-up of decoding.
        of_ceiling: measured as a share of what an engine without overhead of its own would reach.
        host_share: of the time of decoding.
    """

    draft: str
    setting: Setting
    predicted: float
    measured: float | None
    of_ceiling: float | None
    host_share: float

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if self.measured is None else self.measured / self.predicted


@dataclass(frozen=True)
class CostModel:
    """Costs at one temperature.

    Attributes:
        temperature: sampling takes time, too.
        costs: by draft, the baseline's under its name.
        predictions: for every setting that was measured.
    """

    temperature: float
    costs: dict[str, RoundCost]
    predictions: list[Prediction]

    @staticmethod
    def fit(result: EvalResult, temperature: float) -> CostModel | None:
        """From all settings of a temperature; None where the baseline or every draft lacks rounds."""
        entries = [entry for entry in result.drafts if entry.setting.temperature == temperature and entry.timings]
        plain = [entry for entry in entries if entry.draft == BASELINE]
        if not plain or len(plain) == len(entries):
            return None
        pace = paces({entry.setting: entry.timings for entry in plain})
        entries = [entry for entry in entries if entry.setting in pace]
        costs = {
            name: RoundCost.fit([_at(pace[e.setting], t) for e in entries if e.draft == name for t in e.timings])
            for name in dict.fromkeys(entry.draft for entry in entries)
        }
        return CostModel(temperature, costs, list(_predictions(entries, costs)))

    @property
    def error(self) -> float:
        """Of all predictions, see `typical_error`."""
        return typical_error(self.predictions)

    def plain_s(self, rows: float) -> float:
        """Seconds of a round without a draft."""
        return self.costs[BASELINE].seconds(rows, 1, 0)

    def speedup(self, draft: str, rows: int, width: int, steps: int, tau: float) -> float:
        """Of decoding, in rounds of one size that emit `tau` tokens a row."""
        return tau * self.plain_s(rows) / self.costs[draft].seconds(rows, width, steps)


def typical_error(predictions: Sequence[Prediction]) -> float:
    """Median over settings of how far predictions are off, as a share; 0 where nothing was measured."""
    ratios = [p.ratio for p in predictions if p.ratio is not None]
    return statistics.median(abs(1 - ratio) for ratio in ratios) if ratios else 0.0


def cost_models(result: EvalResult) -> list[CostModel]:
    """One a temperature."""
    found = [CostModel.fit(result, t) for t in dict.fromkeys(s.temperature for s in result.settings)]
    return [model for model in found if model is not None]


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float], weights: Sequence[float]) -> Coefficients:
    """Least squares of relative errors under the condition that no coefficient is negative.

    Args:
        features: [N, F], F small: every subset of the features is tried.
        seconds: [N]; those that are not positive are left out.
        weights: [N], rounds behind each.

    Returns:
        F coefficients. Features that others explain as well are 0, so a thing that never varied costs nothing.
    """
    times = np.asarray(seconds, dtype=np.float64)
    timed = times > 0
    count = len(features[0])
    if not timed.any():
        return (0.0,) * count
    scale = np.sqrt(np.asarray(weights, dtype=np.float64)[timed]) / times[timed]
    matrix = np.asarray(features, dtype=np.float64)[timed] * scale[:, None]
    wanted = times[timed] * scale
    best, least = np.zeros(count), np.inf
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            solved = _solve(matrix[:, chosen], wanted)
            if solved is None:
                continue
            missed = float(((matrix[:, chosen] @ solved - wanted) ** 2).sum())
            # More features have to earn their place: rounding alone must not bring one in.
            if missed < least - 1e-9 * float(wanted @ wanted):
                least, best = missed, np.zeros(count)
                best[list(chosen)] = solved
    return tuple(best.tolist())


def paces(plain: Mapping[Setting, Sequence[RoundTime]]) -> dict[Setting, float]:
    """How much slower than on the whole the machine was in each setting, by its rounds without a draft.

    That more rows take longer is told from a slower machine within settings: log t = log(1 + slope rows) + log pace,
    and the slope is what leaves least of log t unexplained. Where no setting has rounds of different size, paces are
    taken to be as alike as they can be.
    """
    found: list[tuple[float, dict[Setting, float]]] = []
    for slope in (0.0, *np.geomspace(1e-3, 10, 81).tolist()):
        within, means, weights = 0.0, {}, {}
        for setting, timings in plain.items():
            counts = np.array([t.rounds for t in timings], dtype=np.float64)
            logs = np.array([math.log(_total(t) / (1 + slope * t.rows)) for t in timings])
            means[setting], weights[setting] = float(np.average(logs, weights=counts)), float(counts.sum())
            within += float((counts * (logs - means[setting]) ** 2).sum())
        overall = sum(means[s] * weights[s] for s in means) / sum(weights.values())
        between = sum(weights[s] * (means[s] - overall) ** 2 for s in means)
        found.append((within + _ALIKE * between, {s: math.exp(means[s] - overall) for s in means}))
    return min(found, key=lambda tried: tried[0])[1]


def _total(timing: RoundTime) -> float:
    return timing.draft_s + timing.verify_s + timing.host_s


def _at(pace: float, timing: RoundTime) -> RoundTime:
    return replace(timing, draft_s=timing.draft_s / pace, verify_s=timing.verify_s / pace, host_s=timing.host_s / pace)


def _solve(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """None where the features depend on each other or a coefficient is negative."""
    solved, _, rank, _ = np.linalg.lstsq(matrix, wanted, rcond=1e-9)
    if rank < matrix.shape[1] or bool((solved < 0).any()):
        return None
    return np.asarray(solved, dtype=np.float64)


def _verify(rows: float, width: float) -> tuple[float, float, float]:
    return 1.0, rows, rows * width


def _draft(rows: float, steps: float) -> tuple[float, float, float, float]:
    return 1.0, rows, steps, rows * steps


def _dot(coefficients: Coefficients, features: Sequence[float]) -> float:
    return sum(c * f for c, f in zip(coefficients, features, strict=True))


def _predictions(entries: Sequence[DraftResult], costs: dict[str, RoundCost]) -> Iterator[Prediction]:
    """Each setting's own mix of round sizes, at the model's prices."""
    plain = {entry.setting: entry for entry in entries if entry.draft == BASELINE}
    for entry in entries:
        if entry.draft == BASELINE or entry.split is None:
            continue
        mine, theirs = (
            sum(t.rounds * costs[e.draft].seconds(t.rows, t.width, t.steps) for t in e.timings) / e.acceptance.emitted
            for e in (entry, plain[entry.setting])
        )
        yield Prediction(
            entry.draft,
            entry.setting,
            theirs / mine,
            entry.speed.speedup if entry.speed else None,
            entry.speed.of_ceiling if entry.speed else None,
            entry.split.host_s / entry.split.total_s,
        )
