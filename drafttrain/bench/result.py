"""What an evaluation found, in a form that is written to `result.json` and read by every report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from drafttrain.bench.divergence import ExactMatch
from drafttrain.bench.lengths import LengthBucket
from drafttrain.bench.metrics import Acceptance
from drafttrain.bench.rounds import RoundTime
from drafttrain.bench.speed import Speed, TimeSplit
from drafttrain.bench.training_cost import TrainingCost
from drafttrain.errors import DataError
from drafttrain.files import read_json

SCHEMA = 2
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
class Memory:
    """Bytes, as the engine holds them. Of a draft: what it adds to decoding without one.

    Attributes:
        weights: of the model; its head where that is the target's is not counted twice.
        state: of caches for `rows` requests of `length` tokens.
    """

    weights: int
    state: int
    rows: int
    length: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.state

    @property
    def per_token(self) -> float:
        """Bytes of state for one token of one request."""
        return self.state / (self.rows * self.length)


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
        variant: what is proposed where that is no chain of `setting.k`; the end of `draft`.
        prefills, prompt_tokens: prompts read, repeats counted, and their tokens.
        memory: of the target for the baseline, else what the draft adds.
        by_prompt, by_output: speed-up by tokens of the prompt and of the baseline's answer; empty for the baseline.
        timings: seconds of rounds by their size.
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
    variant: str = ""
    prefills: int = 0
    prompt_tokens: int = 0
    memory: Memory | None = None
    by_prompt: list[LengthBucket] = field(default_factory=list)
    by_output: list[LengthBucket] = field(default_factory=list)
    timings: list[RoundTime] = field(default_factory=list)

    @property
    def base(self) -> str:
        """The draft whose variant this is."""
        return self.draft.removesuffix(self.variant).rstrip() if self.variant else self.draft

    @property
    def proposes(self) -> str:
        """The variant in words."""
        return self.variant or f"K={self.setting.k}"


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
        weights: SHA-256 of that draft's weights; "" also in results from before it was kept.
        suite: the resolved suite.
        prompts: conversations in it; categories: prompts in each.
        drafts: one entry for each draft and setting, the baseline first in each setting.
        texts: a few answers of the first greedy setting.
        notes: what a reader has to know: prompts that did not fit, figures that are no result.
        hardware, versions, commit, date: where and when.
        device: "cpu" or "cuda".
        training: what the draft under test cost; None where its run does not say.
    """

    target: str
    run: str
    recipe: str
    family: str
    suite: dict[str, Any]
    prompts: int
    categories: dict[str, int]
    drafts: list[DraftResult]
    hardware: str
    versions: dict[str, str]
    commit: str
    date: str
    texts: list[AnswerText] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    device: str = "cpu"
    training: TrainingCost | None = None
    weights: str = ""

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


def load_result(path: Path) -> EvalResult:
    """Read a `result.json`.

    Raises:
        UserError: no such file, or one of another version.
    """
    value = read_json(path)
    found = value.get("schema") if isinstance(value, dict) else None
    if found != SCHEMA:
        raise DataError(
            f"is a result of version {found}, this is version {SCHEMA}",
            where=path,
            remedy="measure again: drafttrain eval RUN --suite SUITE",
        )
    try:
        return TypeAdapter(EvalResult).validate_python(value)
    except ValidationError as error:
        raise DataError(
            f"is no result: {error.errors()[0]['msg']} at {'.'.join(map(str, error.errors()[0]['loc']))}",
            where=path,
            remedy="measure again: drafttrain eval RUN --suite SUITE",
        ) from None
