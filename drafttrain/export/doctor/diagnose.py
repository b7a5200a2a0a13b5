"""The trial: run the draft, compare what is accepted with what it claims, find the reading in which more is."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.finding import Finding, Severity, error, warning
from drafttrain.export.doctor.mending import mend_case
from drafttrain.export.doctor.readings import Reading, readings
from drafttrain.export.doctor.served import Unserved, as_served
from drafttrain.export.doctor.trial import Accepted, Answers
from drafttrain.export.prove.bundled import run_bundled
from drafttrain.export.prove.compare import wilson
from drafttrain.export.prove.server import Counters
from drafttrain.modeling.causal_lm import CausalLM

FLOOR = 0.05
"""Share of rounds with an accepted first token below which a draft accepts nothing: chance alone reaches it."""
AS_IT_IS = "as it lies there"
_CLAIM = 0.8
_STEPS = 3
RULES = ("accepts-nothing", "below-claim", "reading", "not-served")


@dataclass(frozen=True)
class Tried:
    """A reading and what came of it; `why` it could not run instead."""

    what: str
    counters: Counters | None
    why: str = ""
    better: bool = False


@dataclass
class Trial:
    """The outcome.

    Attributes:
        setting: prompts, k, tokens: what is needed to repeat it.
        counters: of the folder as it lies there, in the bundled engine; None where an engine would not run it. In
            16-bit floats they may differ a little from those on paper, which readings are compared by.
        why: it would not.
        claim: what the draft claims, of `drafttrain.json`, cut to `k` depths; None without.
        tried: every reading, in order; those of later steps on top of what was adopted before.
        findings: of the trial.
        overruled: rules whose mends were shown to make the draft worse.
    """

    setting: dict[str, Any]
    counters: Counters | None = None
    why: str = ""
    claim: dict[str, Any] | None = None
    tried: list[Tried] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    overruled: set[str] = field(default_factory=set)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "setting": self.setting,
            "accepted": _json(self.counters),
            "why_not": self.why,
            "claim": self.claim,
            "tried": [
                {"reading": one.what, "accepted": _json(one.counters), "why_not": one.why, "better": one.better}
                for one in self.tried
            ],
            "overruled": sorted(self.overruled),
        }


def _json(counters: Counters | None) -> dict[str, Any] | None:
    if counters is None:
        return None
    return {
        "rounds": counters.drafts,
        "mean_length": counters.mean_length,
        "per_position": [kept / counters.drafts for kept in counters.per_position] if counters.drafts else [],
    }


def run_trial(
    case: Case,
    findings: Sequence[Finding],
    target: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_new_tokens: int,
    stop_ids: Set[int] = frozenset(),
) -> Trial:
    """Run a draft greedily on some prompts, as the engine would read it and in other readings.

    Args:
        findings: of the lint; their mends are tried, too.
        target: as it will serve.
        prompts: token ids.
        k: draft tokens a round.
        max_new_tokens: of an answer.
        stop_ids: tokens that end one.

    Raises:
        EngineError: prompts that leave no room in the target's context.
    """
    trial = Trial({"prompts": len(prompts), "k": k, "max_new_tokens": max_new_tokens})
    answers = Answers(target, prompts, k=k, max_new_tokens=max_new_tokens, stop_ids=stop_ids)
    now: Accepted | None = None
    try:
        drafter = as_served(case, target, k).drafter(target)
    except Unserved as raised:
        trial.why = raised.what
    else:
        now = answers.accepted(drafter)
        trial.tried.append(Tried(AS_IT_IS, now.counters))
        depth = min(k, drafter.max_depth) if drafter.family == "medusa" else k
        served = run_bundled(
            target, drafter, prompts, k=depth, max_new_tokens=max_new_tokens, rows=8, stop_ids=stop_ids
        )
        trial.counters = served.counters
    trial.claim = _claim(case, k)
    _judge(trial)
    _search(trial, case, findings, answers, now)
    if trial.counters is None and not any(one.severity is Severity.error for one in findings):
        found = error(
            f"the engine would not run it: {trial.why}",
            "it fails when it loads, or a part of it is chance",
            "see the other findings; export the draft again",
        )
        trial.findings.append(replace(found, rule="not-served"))
    return trial


def _claim(case: Case, k: int) -> dict[str, Any] | None:
    """What `drafttrain export` forecast for the draft."""
    forecast = (case.about or {}).get("forecast")
    if not forecast or not forecast.get("unconditional"):
        return None
    positions = [float(p) for p in forecast["unconditional"][:k]]
    return {"source": str(forecast.get("source")), "per_position": positions, "mean_length": 1 + sum(positions)}


def _judge(trial: Trial) -> None:
    """Against the floor and the claim."""
    counters, claim = trial.counters, trial.claim
    if counters is None or not counters.drafts:
        return
    first = counters.per_position[0] / counters.drafts
    if first < FLOOR:
        found = error(
            f"the first draft token is accepted in {first:.1%} of {counters.drafts} rounds",
            "the draft accepts nothing: the server is slower than without it",
            "see the readings that were tried; if none helps, the weights are not those that were trained",
        )
        trial.findings.append(replace(found, rule="accepts-nothing"))
    elif claim is not None:
        wanted = claim["per_position"][0]
        _, high = wilson(counters.per_position[0], counters.drafts)
        if high < _CLAIM * wanted:
            found = warning(
                f"the first draft token is accepted in {first:.1%} of {counters.drafts} rounds, the draft claims "
                f"{wanted:.1%} ({claim['source']})",
                "either these prompts are harder than those of the claim, or a part of the draft is read wrongly",
                "try the prompts of the claim with --prompts; see the readings that were tried",
            )
            trial.findings.append(replace(found, rule="below-claim"))


def _search(trial: Trial, case: Case, findings: Sequence[Finding], answers: Answers, now: Accepted | None) -> None:
    """Adopt the best reading, and look again on top of it."""
    before = f"the engine would not run it ({trial.why})" if now is None else _said(now)
    if now is None:
        # Several faults can each keep it from running: mend all that the rules can first.
        case, findings = mend_case(case).case, ()
        outcome = _try(case, answers)
        trial.tried.append(_tried("all mends of the rules together", outcome))
        if isinstance(outcome, str):
            return
        now = outcome
    for step in range(_STEPS):
        best: tuple[Reading, Case, Accepted] | None = None
        for reading in readings(case, findings if step == 0 else ()):
            changed = replace(case, draft=case.draft.mended(reading.mend))
            outcome = _try(changed, answers)
            trial.tried.append(_tried(reading.what, outcome, now))
            if isinstance(outcome, str):
                continue
            if reading.rule and now.beats(outcome):
                trial.overruled.add(reading.rule)
            # Of equally good ones the first: a rule's own mend says why.
            if outcome.beats(now) and (best is None or outcome.per_round > best[2].per_round):
                best = (reading, changed, outcome)
        if best is None:
            return
        reading, case, now = best
        found = error(
            f"{reading.what}: then {_said(now)}; as it lies there: {before}",
            "the folder says something else than the draft was trained with"
            + (f" (see {reading.rule})" if reading.rule else ""),
            reading.what,
            reading.mend,
        )
        trial.findings.append(replace(found, rule="reading"))


def _tried(what: str, outcome: Accepted | str, now: Accepted | None = None) -> Tried:
    if isinstance(outcome, str):
        return Tried(what, None, outcome)
    return Tried(what, outcome.counters, better=now is None or outcome.beats(now))


def _said(accepted: Accepted) -> str:
    return f"{1 + accepted.per_round:.2f} tokens a round, the first draft token accepted in {accepted.first:.1%}"


def _try(case: Case, answers: Answers) -> Accepted | str:
    try:
        return answers.accepted(as_served(case, answers.target, answers.k).drafter(answers.target))
    except Unserved as raised:
        return raised.what
