"""Advice in words."""

from __future__ import annotations

from collections.abc import Iterator

from drafttrain.bench.advice import Advice, Basis, Fit, Option
from drafttrain.bench.report import text
from drafttrain.files import size_text

_SAYS: dict[Basis, str] = {
    "measured": "measured",
    "interpolated": "predicted, between what was measured",
    "extrapolated": "EXTRAPOLATED beyond what was measured",
}


def in_words(advice: Advice) -> Iterator[str]:
    """Lines for the terminal."""
    kind = "greedy" if advice.temperature == 0 else f"T={advice.temperature:g}"
    yield f"{advice.run} ({advice.family}) on {advice.target}, {kind}"
    yield f"from suite {advice.suite}, {advice.hardware}, {advice.date}"
    yield ""
    yield "What to propose"
    for option in advice.best:
        yield f"  batch {option.batch}: {_option(option)}"
    yield f"  {_end(advice)}"
    for rival in advice.rivals:
        yield f"  batch {rival.batch}: {rival.draft} is faster: {rival.variant}, {_figures(rival)}"
    yield ""
    yield "Chains by batch size, for servers without trees"
    for (first, last, k), basis in zip(advice.chains, advice.chain_basis, strict=True):
        sizes = f"batch {first}" if first == last else f"batch {first} to {last}"
        yield f"  {sizes}: {f'K={k}' if k else 'do not draft'} ({_SAYS[basis]})"
    if advice.break_even:
        yield ""
        yield "Short outputs"
        for point in advice.break_even:
            yield (
                f"  batch {point.batch}, {point.variant}: pays from {_tokens(point.tokens)} on; the draft adds "
                f"{1000 * point.prefill_s:.1f} ms to a prompt of {point.prompt_tokens:.0f} tokens (measured)"
            )
    yield ""
    yield "Acceptance of chains, the same on any hardware"
    yield "  " + ", ".join(
        f"K={k} tau {tau:.2f}{'' if basis == 'measured' else ' (from a longer chain)'}"
        for k, tau, basis in advice.acceptance
    )
    yield ""
    yield f"Speed-up, measured / predicted by the cost model (off by {text.percent(advice.error)} in the median)"
    for p in advice.predictions:
        measured = text.number(p.measured, 2, "x") if p.measured is not None else "no result"
        yield (
            f"  {p.draft}, {p.setting}: {measured} / {p.predicted:.2f}x = {text.number(p.ratio)}; "
            f"{text.percent(p.of_ceiling, 0)} of the ceiling, host time {text.percent(p.host_share)}"
        )
    if advice.fit is not None:
        yield ""
        yield from _fit(advice.fit)
    yield ""
    for note in advice.notes:
        yield f"note: {note}"


def _option(option: Option) -> str:
    if not option.pays:
        return f"do not draft; the best is {option.variant}, {_figures(option)}"
    doubt = ""
    if option.interval is not None and option.interval[0] <= 1:
        doubt = "; the interval does not exclude a loss"
    return f"{option.variant}, {_figures(option)}{doubt}"


def _figures(option: Option) -> str:
    speedup = text.with_interval(option.speedup, option.interval, unit="x")
    return f"{speedup} at tau {option.tau:.2f} ({_SAYS[option.basis]})"


def _end(advice: Advice) -> str:
    if advice.off_from is None:
        return "off: at no batch size that was looked at for good"
    batch, basis = advice.off_from
    return f"off: from batch {batch} on ({_SAYS[basis]})"


def _tokens(count: float) -> str:
    whole = int(count) + (count > int(count))
    return "the first token" if whole <= 1 else f"{whole} tokens"


def _fit(fit: Fit) -> Iterator[str]:
    yield f"Memory of {size_text(fit.budget)}, requests of {fit.context} tokens"
    yield (
        f"  target {size_text(fit.target)} + {size_text(fit.target_per_token * fit.context)} a request; "
        f"draft {size_text(fit.draft)} + {size_text(fit.draft_per_token * fit.context)} a request (measured)"
    )
    if fit.rows_plain == 0:
        yield "  not even the target with one request fits"
    elif fit.rows_drafting == 0:
        yield f"  without drafting {fit.rows_plain} requests fit; the draft does not"
    else:
        yield f"  {fit.rows_plain} requests fit without drafting, {fit.rows_drafting} with it"
    yield "  activations of a forward are not counted"
