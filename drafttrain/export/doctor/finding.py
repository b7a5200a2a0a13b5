"""What the doctor finds, and how it is mended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor


class Severity(StrEnum):
    """How bad a finding is."""

    error = "error"
    """Is not loaded, or accepts less than it could, mostly in silence."""
    warning = "warning"
    """May be meant, and is wrong unless it is."""
    note = "note"
    """Worth knowing."""


@dataclass(frozen=True)
class Mend:
    """A change of a draft's folder.

    Attributes:
        keys: of config.json, dotted where nested -> the new value.
        drop_keys: to be taken out.
        tensors: stored name -> the new tensor.
        drop_tensors: to be taken out.
        options: of the `speculative_config` beside a draft for TensorRT-LLM -> the new value.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    drop_keys: tuple[str, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    drop_tensors: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        severity: see `Severity`.
        what: is wrong, with the names and numbers found.
        why: it matters: what an engine makes of it.
        remedy: how to mend it.
        mend: what `--fix` does, or None where only a person can tell.
        rule: id of the rule.
    """

    severity: Severity
    what: str
    why: str
    remedy: str
    mend: Mend | None = None
    rule: str = ""

    @property
    def fixable(self) -> bool:
        """Whether `--fix` mends it."""
        return self.mend is not None

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "rule": self.rule,
            "severity": str(self.severity),
            "what": self.what,
            "why": self.why,
            "remedy": self.remedy,
            "fixable": self.fixable,
        }


def error(what: str, why: str, remedy: str, mend: Mend | None = None) -> Finding:
    """A finding that fails."""
    return Finding(Severity.error, what, why, remedy, mend)


def warning(what: str, why: str, remedy: str, mend: Mend | None = None) -> Finding:
    """A finding that may be meant."""
    return Finding(Severity.warning, what, why, remedy, mend)


def note(what: str, why: str, remedy: str, mend: Mend | None = None) -> Finding:
    """A finding to know of."""
    return Finding(Severity.note, what, why, remedy, mend)
