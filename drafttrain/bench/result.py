"""What an evaluation found, in a form that is written to `result.json` and read by every report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from drafttrain.bench.divergence import ExactMatch
from drafttrain.bench.metrics import Acceptance
from drafttrain.bench.speed import Speed, TimeSplit

SCHEMA = 1
BASELINE = "none"
"""Name of the engine with drafting off."""


@dataclass(frozen=True)
class Setting:
    """One combination that is measured by itself."""

    k: int
    temperature: float
    batch: int

    def __str__(self) -> str:
        return f"K={self.k}, T={self.temperature:g}, batch {self.batch}"


@dataclass(frozen=True)
class DraftResult:
    """One draft in one setting.

    Attributes:
        draft: its name; `BASELINE` for drafting off.
        family: eagle3, medusa, ngram, ...
        requests: conversations that were run; answers: turns of theirs; tokens: emitted, those of prefills
            included.
        acceptance: over everything; categories: the same by category.
        split: where decoding time went.
        speed: against the baseline; None for the baseline itself or when nothing was decoded.
        exact: greedy answers against the baseline's; None when sampled.
        prefill_s, decode_s: wall seconds.
    """

    draft: str
    family: str
    setting: Setting
    requests: int
    answers: int
    tokens: int
    acceptance: Acceptance
    categories: dict[str, Acceptance]
    split: TimeSplit | None
    speed: Speed | None
    exact: ExactMatch | None
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class AnswerText:
    """A generated answer, token by token.

    Attributes:
        pieces: (text, writer); writer 0 is the target, d >= 1 a draft token accepted at depth d.
        reason: why it ended.
    """

    draft: str
    request: str
    category: str
    turn: int
    prompt: str
    pieces: list[tuple[str, int]]
    reason: str


@dataclass(frozen=True)
class EvalResult:
    """One run of a suite.

    Attributes:
        target: name of the target; run, recipe, family: of the draft under test ("" without one).
        suite: the resolved suite.
        prompts: conversations in it; categories: prompts in each.
        drafts: one entry for each draft and setting, the baseline first in each setting.
        texts: a few answers of the first greedy setting.
        notes: what a reader has to know: prompts that did not fit, figures that are no result.
        hardware, versions, commit, date: where and when.
    """

    target: str
    run: str
    recipe: str
    family: str
    suite: dict[str, Any]
    prompts: int
    categories: dict[str, int]
    drafts: list[DraftResult]
    texts: list[AnswerText]
    hardware: str
    versions: dict[str, str]
    commit: str
    date: str
    notes: list[str] = field(default_factory=list)

    @property
    def settings(self) -> list[Setting]:
        """In the order in which they were run."""
        return list(dict.fromkeys(entry.setting for entry in self.drafts))

    def of(self, setting: Setting) -> list[DraftResult]:
        """All drafts of one setting, the baseline first."""
        return [entry for entry in self.drafts if entry.setting == setting]

    def to_json(self) -> dict[str, Any]:
        """For `result.json`; the texts stay in the report."""
        value = asdict(self)
        del value["texts"]
        for entry, plain in zip(self.drafts, value["drafts"], strict=True):
            if entry.speed is not None:
                plain["speed"]["of_ceiling"] = entry.speed.of_ceiling
            if entry.exact is not None:
                plain["exact"]["rate"] = entry.exact.rate
        return {"schema": SCHEMA, **value}
