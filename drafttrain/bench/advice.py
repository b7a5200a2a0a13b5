"""Advice from an evaluation: what to propose at each batch size, when not to draft, and what fits into memory.

A measured figure is preferred to the cost model's: a guess is corrected by what the model misses of the same draft at
the nearest batch size that was measured, and has to beat the measurement by more than the model is usually off. What
lies outside the batch sizes and widths that were timed is called extrapolated, and nothing is said of another device.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drafttrain.bench.bootstrap import Interval
from drafttrain.bench.cost_model import CostModel, Prediction, typical_error
from drafttrain.bench.metrics import Acceptance
from drafttrain.bench.result import BASELINE, DraftResult, EvalResult
from drafttrain.errors import DataError

Basis = Literal["measured", "interpolated", "extrapolated"]
# How far beyond the largest batch that was measured one looks for the end of the gain.
_FARTHER = 4
# A draft whose rounds propose fewer than this share of K decides by itself: its rounds at another K are unknown.
_ALWAYS = 0.8
# Times that follow batch and width no better than this were disturbed.
_DISTURBED = 0.1
# The least that is not printed as 1.00x.
_GAIN = 1.005
# They replay the answers of the baseline.
_NO_DRAFTS = ("oracle", "synthetic")


@dataclass(frozen=True)
class Option:
    """Something to propose at a batch size.

    Attributes:
        variant: "K=4" or a tree.
        k: of a chain; None = a tree.
        speedup: of decoding. interval: 95 %, where it was measured.
        tau: tokens a round.
    """

    batch: int
    draft: str
    variant: str
    k: int | None
    speedup: float
    interval: Interval | None
    tau: float
    basis: Basis

    @property
    def pays(self) -> bool:
        """Whether it is faster than not to draft: 1.00x, as people read it, is not."""
        return self.speedup >= _GAIN


@dataclass(frozen=True)
class BreakEven:
    """Shortest output for which drafting pays at a batch size, the draft's own prefill counted.

    Attributes:
        tokens: of the output.
        prefill_s: seconds that the draft adds to reading a prompt of `prompt_tokens`.
    """

    batch: int
    variant: str
    tokens: float
    prefill_s: float
    prompt_tokens: float


@dataclass(frozen=True)
class Fit:
    """What fits into a memory budget; activations of a forward are not counted.

    Attributes:
        budget: bytes. context: tokens of a request, prompt and output.
        target, draft: bytes of weights.
        target_per_token, draft_per_token: bytes of caches.
        rows_plain, rows_drafting: requests at once without and with the draft.
    """

    budget: int
    context: int
    target: int
    draft: int
    target_per_token: float
    draft_per_token: float
    rows_plain: int
    rows_drafting: int


@dataclass(frozen=True)
class Advice:
    """Of one draft at one temperature.

    Attributes:
        run, family, target: names; suite, hardware, device, date: of the evaluation.
        best: for each batch size that was measured and gave a result; it need not pay.
        chains: for each batch size up to the largest, as (first, last, K), 0 = off; for servers without trees.
        chain_basis: the basis of each of `chains`.
        off_from: first batch size from which drafting does not pay; None if not within 4 x the largest.
        rivals: other drafts that were faster at a batch size.
        break_even: for each batch size at which drafting pays.
        acceptance: (K, tau, basis): of chains, holds on any hardware.
        predictions, error: how well the cost model meets what was measured of the draft.
        fit: against a budget, where one is given.
        notes: what limits all this.
    """

    run: str
    family: str
    target: str
    suite: str
    hardware: str
    device: str
    date: str
    temperature: float
    best: list[Option]
    chains: list[tuple[int, int, int]]
    chain_basis: list[Basis]
    off_from: tuple[int, Basis] | None
    rivals: list[Option]
    break_even: list[BreakEven]
    acceptance: list[tuple[int, float, Basis]]
    predictions: list[Prediction]
    error: float
    fit: Fit | None
    notes: list[str]


def advise(result: EvalResult, *, budget: int | None = None, context: int | None = None) -> Advice:
    """Advice on the draft under test, at the evaluation's first temperature.

    Args:
        result: of an evaluation of the draft.
        budget: bytes for target, draft and their caches.
        context: tokens of a request for the budget; default: the longest of the evaluation.

    Raises:
        DataError: the draft was not measured, or too little of it.
    """
    temperature = result.settings[0].temperature if result.settings else 0.0
    model = CostModel.fit(result, temperature) if result.run else None
    here = [entry for entry in result.drafts if entry.setting.temperature == temperature]
    mine = [entry for entry in here if result.run and entry.base == result.run and entry.acceptance.tau is not None]
    if model is None or not mine:
        raise DataError(
            "holds no rounds of a trained draft",
            remedy='measure one: drafttrain eval RUN --suite eval/suites/tables.yaml, with "run" among drafts',
        )
    adviser = _Adviser(model, mine)
    batches = sorted({entry.setting.batch for entry in mine})
    best = [option for batch in batches if (option := adviser.best(batch)) is not None]
    ranges = list(_ranges([adviser.best(batch, trees=False) for batch in range(1, batches[-1] + 1)]))
    return Advice(
        run=result.run,
        family=result.family,
        target=result.target,
        suite=str(result.suite["name"]),
        hardware=result.hardware,
        device=result.device,
        date=result.date,
        temperature=temperature,
        best=best,
        chains=[bounds for bounds, _ in ranges],
        chain_basis=[basis for _, basis in ranges],
        off_from=adviser.off_from(),
        rivals=list(_rivals(here, result.run, best)),
        break_even=[_break_even(here, option, adviser) for option in best if option.pays],
        acceptance=[adviser.chain_tau(k) for k in range(1, adviser.longest + 1)],
        predictions=adviser.predictions,
        error=adviser.error,
        fit=None if budget is None else _fit(here, mine, best, budget, context),
        notes=list(_notes(result, batches, adviser)),
    )


class _Adviser:
    """Weighs what one draft may propose.

    Args:
        model: of the temperature.
        entries: the draft's chains and trees in every setting of it, each with rounds.
    """

    def __init__(self, model: CostModel, entries: Sequence[DraftResult]) -> None:
        self.model = model
        self.entries = entries
        self.chains = [entry for entry in entries if not entry.variant]
        self.lengths = sorted({entry.setting.k for entry in self.chains})
        self.longest = self.lengths[-1] if self.lengths else 0
        self.batches = sorted({entry.setting.batch for entry in entries})
        proposed = sum(t.proposed for entry in self.chains for t in entry.timings)
        wanted = sum(t.rounds * t.rows * e.setting.k for e in self.chains for t in e.timings)
        # With one K, no round tells what another costs.
        names = {entry.draft for entry in entries}
        self.predictions = [p for p in model.predictions if p.draft in names]
        self.error = typical_error(self.predictions)
        self.can_choose_k = len(self.lengths) > 1 and proposed >= _ALWAYS * wanted

    def best(self, batch: int, trees: bool = True) -> Option | None:
        """The fastest option at a batch size, whether it pays or not; None where no figure is a result."""
        options = [option for option in self.options(batch) if trees or option.k is not None]
        measured = max((o for o in options if o.basis == "measured"), key=_speed, default=None)
        guessed = max((o for o in options if o.basis != "measured"), key=_speed, default=None)
        if measured and guessed and guessed.speedup > measured.speedup * (1 + self.error):
            return guessed
        return measured or guessed

    def options(self, batch: int) -> Iterator[Option]:
        """All that can be said something about; where a setting was measured and flagged, nothing is."""
        known = set()
        for entry in self.entries:
            if entry.setting.batch == batch:
                known.add((entry.draft, entry.setting.k))
                speed, tau = entry.speed, entry.acceptance.tau
                if speed is not None and speed.speedup is not None and tau is not None:
                    k = None if entry.variant else entry.setting.k
                    yield Option(
                        batch, entry.draft, entry.proposes, k, speed.speedup, speed.speedup_ci, tau, "measured"
                    )
        for k in range(1, self.longest + 1) if self.can_choose_k else self.lengths:
            draft = self.chains[0].draft
            if (draft, k) not in known:
                tau = self.chain_tau(k)[1]
                speedup = self._missed(draft, batch) * self.model.speedup(draft, batch, k + 1, k, tau)
                yield Option(batch, draft, f"K={k}", k, speedup, None, tau, self._basis(draft, batch, k + 1))
        for draft in dict.fromkeys(entry.draft for entry in self.entries if entry.variant):
            tree = next(entry for entry in self.entries if entry.draft == draft)
            if (draft, tree.setting.k) not in known:
                size = max(tree.timings, key=lambda t: t.rounds)
                tau = _pooled([entry.acceptance for entry in self.entries if entry.draft == draft])
                speedup = self.model.speedup(draft, batch, size.width, size.steps, tau) * self._missed(draft, batch)
                basis = self._basis(draft, batch, size.width)
                yield Option(batch, draft, tree.proposes, None, speedup, None, tau, basis)

    def _missed(self, draft: str, batch: int) -> float:
        """Measured over predicted, in the median of the draft's settings nearest to a batch size."""
        found = [(abs(p.setting.batch - batch), r) for p in self.predictions if p.draft == draft and (r := p.ratio)]
        nearest = min((distance for distance, _ in found), default=0)
        return statistics.median([ratio for distance, ratio in found if distance == nearest] or [1.0])

    def _basis(self, draft: str, batch: int, width: int) -> Basis:
        return "interpolated" if self.model.costs[draft].covers(batch, width) else "extrapolated"

    def chain_tau(self, k: int) -> tuple[int, float, Basis]:
        """(K, tau, basis) of chains of at most the longest K measured.

        A shorter chain accepts what a longer one does down to its depth, so
        tau(K) = (sum over i <= K of rounds that accepted depth i, plus rounds that gave a bonus token) / rounds.
        """
        source = min(length for length in self.lengths if length >= k)
        found = [entry.acceptance for entry in self.chains if entry.setting.k == source]
        return k, _pooled(found, k), "measured" if source == k else "interpolated"

    def off_from(self) -> tuple[int, Basis] | None:
        """First batch size from which no larger one that was looked at pays."""
        best = [self.best(batch) for batch in range(1, _FARTHER * self.batches[-1] + 1)]
        first: tuple[int, Basis] | None = None
        for option in reversed(best):
            if option is None or option.pays:
                break
            first = option.batch, option.basis
        return first


def _speed(option: Option) -> float:
    return option.speedup


def _pooled(found: Sequence[Acceptance], depth: int | None = None) -> float:
    """tau over several settings, with what was accepted below `depth` left out."""
    rounds = emitted = 0.0
    for acceptance in found:
        accepted = [(a or 0.0) * n for a, n in zip(acceptance.alpha, acceptance.judged, strict=True)]
        emitted += sum(accepted[:depth]) + acceptance.rounds - acceptance.cut_rounds
        rounds += acceptance.rounds
    return emitted / rounds


def _ranges(options: Sequence[Option | None]) -> Iterator[tuple[tuple[int, int, int], Basis]]:
    """(first, last, K) of batch sizes in a row that want the same K, and the weakest basis among them."""
    order: tuple[Basis, ...] = ("measured", "interpolated", "extrapolated")
    wanted = [option.k if option is not None and option.pays and option.k else 0 for option in options]
    start = 0
    for index in range(1, len(options) + 1):
        if index == len(options) or wanted[index] != wanted[start]:
            part = [option.basis for option in options[start:index] if option is not None]
            yield (start + 1, index, wanted[start]), max(part, key=order.index, default="extrapolated")
            start = index


def _rivals(entries: Sequence[DraftResult], run: str, best: Sequence[Option]) -> Iterator[Option]:
    """The fastest other draft of each batch size, where it beats the draft under test."""
    for option in best:
        others = [
            Option(option.batch, e.draft, e.proposes, e.setting.k, e.speed.speedup, e.speed.speedup_ci, tau, "measured")
            for e in entries
            if e.setting.batch == option.batch and e.base not in (run, BASELINE) and e.family not in _NO_DRAFTS
            if e.speed is not None and e.speed.speedup is not None and (tau := e.acceptance.tau) is not None
        ]
        fastest = max(others, key=_speed, default=None)
        if fastest is not None and fastest.speedup > option.speedup:
            yield fastest


def _break_even(entries: Sequence[DraftResult], option: Option, adviser: _Adviser) -> BreakEven:
    """After n output tokens drafting has cost its prefill and saved (n - 1) times its gain a token."""
    at_batch = [entry for entry in entries if entry.setting.batch == option.batch]
    same = [entry for entry in at_batch if entry.draft == option.draft]
    drafted = min(same or adviser.chains, key=lambda entry: abs(entry.setting.k - (option.k or entry.setting.k)))
    plain = next(e for e in entries if e.draft == BASELINE and e.setting == drafted.setting)
    extra = max(drafted.prefill_s / drafted.prefills - plain.prefill_s / plain.prefills, 0.0)
    assert plain.split is not None
    a_token = plain.split.total_s / plain.acceptance.emitted
    tokens = 1 + extra / (a_token - a_token / option.speedup)
    return BreakEven(option.batch, option.variant, tokens, extra, drafted.prompt_tokens / drafted.prefills)


def _fit(
    entries: Sequence[DraftResult],
    mine: Sequence[DraftResult],
    best: Sequence[Option],
    budget: int,
    context: int | None,
) -> Fit:
    plain = next((e.memory for e in entries if e.draft == BASELINE), None)
    wanted = {option.draft for option in best}
    drafts = [e.memory for e in mine if e.memory is not None and (e.draft in wanted or not wanted)]
    if plain is None or not drafts:
        raise DataError("holds no memory of the engine", remedy="measure again with this version")
    # Caches grow a little with the tree; the largest of those advised has to fit.
    draft = max(drafts, key=lambda memory: memory.weights + memory.per_token)
    tokens = context or plain.length
    left = budget - plain.weights
    return Fit(
        budget,
        tokens,
        plain.weights,
        draft.weights,
        plain.per_token,
        draft.per_token,
        max(int(left // (plain.per_token * tokens)), 0),
        max(int((left - draft.weights) // ((plain.per_token + draft.per_token) * tokens)), 0),
    )


def _notes(result: EvalResult, batches: Sequence[int], adviser: _Adviser) -> Iterator[str]:
    if result.device == "cpu":
        yield (
            "The times are those of a CPU. They say nothing about a GPU: there, acceptance carries over and the "
            "speed-up has to be measured."
        )
    if adviser.error > _DISTURBED:
        yield (
            f"Times follow batch and width badly (off by {adviser.error:.0%} in the median): the machine was busy, or "
            "too few prompts were run. Take this advice as a rough one and measure again."
        )
    yield "Times are those of the bundled engine; a server with other overheads has other optima."
    if len(batches) == 1:
        yield f"Only batch {batches[0]} was measured: add batch=[1,8] to the eval for advice by batch size."
    if adviser.chains and not adviser.can_choose_k:
        why = "one K was measured" if len(adviser.lengths) == 1 else "how much is proposed is up to the draft"
        yield f"No other K is considered, since {why}: add k=[2,4,6] to the eval to compare."
    if not any(entry.variant for entry in adviser.entries):
        yield "No tree was measured: add trees=[...] to the eval to compare."


def vllm_config(advice: Advice, method: str, model: str) -> Mapping[str, Any] | None:
    """The value of vLLM's `--speculative-config`, chains only; None where drafting is to be off.

    `num_speculative_tokens_per_batch_size` (vLLM 0.32) is a list of [first, last, tokens]; 0 turns drafting off there,
    and beyond the last range its value stays in force.
    """
    most = max((k for _, _, k in advice.chains), default=0)
    if most == 0:
        return None
    config: dict[str, Any] = {"method": method, "model": model, "num_speculative_tokens": most}
    if len(advice.chains) > 1:
        config["num_speculative_tokens_per_batch_size"] = [list(bounds) for bounds in advice.chains]
    return config
