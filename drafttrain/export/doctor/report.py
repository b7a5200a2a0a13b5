"""What an examination came to, for people and for machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.export.doctor.finding import Finding, Severity


@dataclass
class Report:
    """The outcome.

    Attributes:
        draft, target, engine, family: what was examined.
        findings: of the folder as it lies there.
        mended: findings whose mends were written; None where none were asked for.
        left: findings of the mended copy.
        copy: the folder of that copy.
    """

    draft: Path
    target: str
    engine: str
    family: str | None
    findings: list[Finding] = field(default_factory=list)
    mended: list[Finding] | None = None
    left: list[Finding] = field(default_factory=list)
    copy: Path | None = None

    @property
    def status(self) -> int:
        """Exit status: 1 if an error is left, else 0."""
        last = self.findings if self.mended is None else self.left
        return int(has_errors(last))

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        values: dict[str, Any] = {
            "schema": 1,
            "draft": str(self.draft),
            "target": self.target,
            "engine": self.engine,
            "family": self.family,
            "findings": [finding.to_json() for finding in self.findings],
        }
        if self.mended is not None:
            values["copy"] = str(self.copy)
            values["mended"] = [finding.rule for finding in self.mended]
            values["left"] = [finding.to_json() for finding in self.left]
        return values


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether one of them fails."""
    return any(finding.severity is Severity.error for finding in findings)
