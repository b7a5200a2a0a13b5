"""The table of all rules."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from drafttrain.errors import UserError
from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.finding import Finding, Severity
from drafttrain.export.doctor.rules import (
    config,
    folder,
    medusa,
    rotary,
    taps,
    target,
    tensors,
    trtllm,
    values,
    vocabulary,
)
from drafttrain.export.doctor.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    *folder.RULES,
    *config.RULES,
    *target.RULES,
    *taps.RULES,
    *vocabulary.RULES,
    *rotary.RULES,
    *tensors.RULES,
    *medusa.RULES,
    *trtllm.RULES,
    *values.RULES,
)
_ORDER = list(Severity)


def check_ignored(ids: Collection[str], more: Collection[str] = ()) -> None:
    """Refuse ids that no rule has.

    Args:
        more: ids beyond the table.
    """
    known = {rule.id for rule in RULES} | set(more)
    unknown = sorted(set(ids) - known)
    if unknown:
        raise UserError(
            f"no rule {', '.join(map(repr, unknown))}", where="--ignore", remedy=f"known are {', '.join(sorted(known))}"
        )


def lint(case: Case, ignored: Collection[str] = ()) -> list[Finding]:
    """What the rules find, errors first.

    A folder that is not whole is reported as that alone: what is missing would be found by other rules again.
    """
    found: list[Finding] = []
    for rule in RULES:
        if not rule.applies(case):
            continue
        of_rule = [replace(finding, rule=rule.id) for finding in rule.check(case)]
        found += [finding for finding in of_rule if rule.id not in ignored]
        if rule.id == "incomplete" and of_rule:
            break
    return sorted(found, key=lambda finding: _ORDER.index(finding.severity))
