"""Rotary parameters, which engines take from the draft's own config, and the length of the context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drafttrain.export.doctor.case import EAGLE, Case, View
from drafttrain.export.doctor.finding import Finding, Mend, error, warning
from drafttrain.export.doctor.rules.rule import Rule
from drafttrain.export.llama import rope_keys
from drafttrain.modeling.blocks import rope_parameters_of

_PARTIAL = "partial_rotary_factor"
_OLD = ("rope_theta", "rope_scaling", _PARTIAL)


def styles(flat: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """What a reader of `rope_parameters` alone finds, and one of the older keys alone; None where a style is absent."""
    new = old = None
    if flat.get("rope_parameters"):
        new = rope_parameters_of(View({key: value for key, value in flat.items() if key not in _OLD}))
    if flat.get("rope_theta") is not None or flat.get("rope_scaling"):
        old = rope_parameters_of(View({key: value for key, value in flat.items() if key != "rope_parameters"}))
    return new, old


def rope_mend(case: Case, parameters: Mapping[str, Any]) -> Mend:
    """Both styles of keys."""
    return Mend(keys={case.draft.key(key): value for key, value in rope_keys(dict(parameters)).items()})


def conflict(case: Case) -> Iterator[Finding]:
    """Case 16 of docs/cases.md: two styles that say different things."""
    new, old = styles(case.draft.flat)
    if new is None or old is None or _bare(new) == _bare(old):
        return
    right = next((one for one in (new, old) if case.target and _bare(one) == _bare(case.target.rope)), None)
    yield error(
        f"rope_parameters says {_bare(new)}, the older keys {_bare(old)}",
        "engines and releases of transformers read one or the other: in some of them positions turn at a speed that "
        "the draft was not trained with",
        "write the target's into both" if right else "write what the draft was trained with into both",
        rope_mend(case, right) if right else None,
    )


def absent(case: Case) -> Iterator[Finding]:
    """No rotary keys, or one style of them."""
    new, old = styles(case.draft.flat)
    wanted = case.facts.rope
    if new is None and old is None:
        if _bare(wanted) != {"rope_type": "default", "rope_theta": 10000.0}:
            yield _unless_meant(
                case,
                f"there are no rotary keys; the target has {_bare(wanted)}",
                "what is missing silently becomes a base of 10000",
                "write the target's as rope_theta and rope_scaling and as rope_parameters",
            )
    elif old is None and new is not None and _bare(new) != {"rope_type": "default", "rope_theta": 10000.0}:
        yield warning(
            f"rope_parameters alone is given ({_bare(new)})",
            "engines with an older transformers look for rope_theta and rope_scaling, and take 10000 without them",
            "write both",
            rope_mend(case, new),
        )


def _unless_meant(case: Case, what: str, why: str, remedy: str) -> Finding:
    """drafttrain trains with the target's parameters, some other tools with 10000: of their drafts the trial tells."""
    if case.about is not None:
        return error(what, why, remedy, rope_mend(case, case.facts.rope))
    return warning(what, why, f"{remedy} if the draft was trained with it; the trial tries both")


def theta(case: Case) -> Iterator[Finding]:
    """The base."""
    new, old = styles(case.draft.flat)
    if new is None and old is None:
        return
    found, wanted = float(case.rope["rope_theta"]), float(case.facts.rope["rope_theta"])
    if found != wanted:
        yield _unless_meant(
            case,
            f"rope_theta is {found:g}, the target's {wanted:g}",
            "a draft turns positions as it was trained; a wrong base is loaded in silence and accepts less",
            "write the target's",
        )


def scaling(case: Case) -> Iterator[Finding]:
    """Scaling and partial rotary factor."""
    new, old = styles(case.draft.flat)
    if new is None and old is None:
        return
    found, wanted = _bare(case.rope), _bare(case.facts.rope)
    for parameters in (found, wanted):
        parameters.pop("rope_theta", None)
    if found != wanted:
        yield warning(
            f"rotary scaling is {found}, the target's {wanted}",
            "right only if the draft was trained so",
            "write the target's if it was trained with it; the trial tries it",
        )


def _bare(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Without what means nothing: a factor of 1, numbers as floats."""
    bare = {
        key: float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
        for key, value in parameters.items()
        if value is not None
    }
    if bare.get(_PARTIAL) == 1.0:
        del bare[_PARTIAL]
    return bare


def context(case: Case) -> Iterator[Finding]:
    """Case 25 of docs/cases.md."""
    said, wanted = case.draft.number("max_position_embeddings"), case.facts.context
    if wanted is None or (said is not None and said >= wanted):
        return
    key = case.draft.key("max_position_embeddings")
    lm = case.draft.family == "draft_lm"
    yield (warning if lm else error)(
        f"max_position_embeddings is {'missing' if said is None else said}, the target's {wanted}",
        "behind this position nothing is drafted, or the rotary table is read past its end",
        "train on longer texts, or limit the server to it" if lm else f"set it to {wanted}",
        None if lm else Mend(keys={key: wanted}),
    )


RULES = (
    Rule("rope-conflict", conflict, EAGLE),
    Rule("rope-absent", absent, EAGLE, needs_target=True),
    Rule("rope-theta", theta, EAGLE, needs_target=True),
    Rule("rope-scaling", scaling, EAGLE, needs_target=True),
    Rule("context-length", context, (*EAGLE, "draft_lm"), needs_target=True),
)
