"""What an examination came to, for people and for machines."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from drafttrain.export.doctor.diagnose import Trial
from drafttrain.export.doctor.finding import Finding, Severity


@dataclass
class Report:
    """The outcome.

    Attributes:
        draft, target, engine, family: what was examined.
        findings: of the folder as it lies there, those of the trial among them.
        trial: None where none was made.
        mended: findings whose mends were written; None where none were asked for.
        left: findings of the mended copy.
        copy: the folder of that copy.
    """

    draft: Path
    target: str
    engine: str
    family: str | None
    findings: list[Finding] = field(default_factory=list)
    trial: Trial | None = None
    mended: list[Finding] | None = None
    left: list[Finding] = field(default_factory=list)
    copy: Path | None = None

    @property
    def status(self) -> int:
        """Exit status: 1 if an error is left, else 0."""
        last = self.findings if self.mended is None else self.left
        return int(has_errors(last))

    def add(self, trial: Trial, ignored: Collection[str] = ()) -> None:
        """Take in a trial: its findings, and a note where it disproved one of the lint."""
        self.trial = trial
        of_trial = [finding for finding in trial.findings if finding.rule not in ignored]
        self.findings = [*of_trial, *(self._after(finding, trial) for finding in self.findings)]
        self.findings.sort(key=lambda finding: list(Severity).index(finding.severity))

    @staticmethod
    def _after(finding: Finding, trial: Trial) -> Finding:
        if finding.rule not in trial.overruled:
            return finding
        return replace(
            finding,
            severity=Severity.note,
            remedy="leave it: in the trial the draft accepts more as it lies there than mended",
            mend=None,
        )

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
        if self.trial is not None:
            values["trial"] = self.trial.to_json()
        if self.mended is not None:
            values["copy"] = str(self.copy)
            values["mended"] = [finding.rule for finding in self.mended]
            values["left"] = [finding.to_json() for finding in self.left]
        return values


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether one of them fails."""
    return any(finding.severity is Severity.error for finding in findings)
