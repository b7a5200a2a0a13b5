"""Round records for tests, written as short as what they say, and a simulated evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from drafttrain.bench.divergence import Divergence, ExactMatch
from drafttrain.bench.lengths import by_length
from drafttrain.bench.metrics import acceptance, by_category
from drafttrain.bench.result import AnswerText, DraftResult, EvalResult, Memory, Setting
from drafttrain.bench.rounds import round_times
from drafttrain.bench.speed import speed, time_split
from drafttrain.engine.records import RoundRecord
from tests.unit.bench.answers import once

CATEGORIES = (
    "writing",
    "reasoning",
    "maths",
    "coding",
    "extraction",
    "summarising",
    "multilingual",
    "multi_turn",
)


@pytest.fixture(scope="session")
def record() -> Callable[..., RoundRecord]:
    """Builder of one round; emits the accepted tokens and the bonus unless told otherwise."""
    return _record


@pytest.fixture(scope="session")
def evaluation() -> EvalResult:
    """A whole result of two settings and three drafts from simulated rounds."""
    return simulate()


def _record(
    request: str = "a",
    *,
    proposed: int = 4,
    accepted: int = 0,
    emitted: int | None = None,
    reason: str | None = None,
    turn: int = 0,
    number: int = 0,
    batch: int = 1,
    draft_s: float = 0.0,
    verify_s: float = 1.0,
    host_s: float = 0.0,
) -> RoundRecord:
    return RoundRecord(
        request=request,
        turn=turn,
        round=number,
        proposed=proposed,
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted,
        reason=reason,
        batch=batch,
        draft_s=draft_s,
        verify_s=verify_s,
        host_s=host_s,
    )


@pytest.fixture(scope="session")
def wide_evaluation() -> EvalResult:
    """A result in which everything varies: K, batch, drafts, a tree, lengths."""
    chains = [Setting(k, 0.0, batch) for batch in (1, 8) for k in (4, 2)]
    return simulate(settings=chains, variant="static 3x2")


TWO = (Setting(4, 0.0, 1), Setting(4, 1.0, 1))


def simulate(seed: int = 0, settings: Sequence[Setting] = TWO, variant: str = "") -> EvalResult:
    """An `EvalResult` as a run of 40 prompts would give it; `variant`: of a tree beside the chains of the first K."""
    rng = random.Random(seed)
    category_of = {f"{name}-{n}": name for name in CATEGORIES for n in range(5)}
    drafts = (("none", "", 0.0, 0.0), ("eagle3-smollm2", "eagle3", 0.62, 0.006), ("ngram", "ngram", 0.2, 0.0))
    tree = (f"eagle3-smollm2 {variant}", "eagle3", 0.7, 0.006)
    entries = []
    for setting in settings:
        temperature = setting.temperature
        baseline: list[RoundRecord] = []
        named = (*drafts, ("oracle", "oracle", 1.0, 0.0)) if temperature == 0 else drafts
        for name, family, alpha, draft_s in (*named, *([tree] if variant and setting.k == settings[0].k else [])):
            records = _rounds(
                rng, category_of, alpha * (0.9 if temperature else 1), draft_s, family == "ngram", setting
            )
            baseline = baseline or records
            lengths = {key: 40 + 20 * (index % 5) for index, key in enumerate(once(baseline))}
            flagged = name == "ngram" and temperature == 1
            entries.append(
                DraftResult(
                    draft=name,
                    family=family,
                    setting=setting,
                    requests=40,
                    answers=40,
                    tokens=40 * 80,
                    acceptance=acceptance(records, samples=200),
                    categories={
                        category: acceptance(rows, samples=200)
                        for category, rows in by_category(records, category_of).items()
                    },
                    split=time_split(records),
                    speed=None
                    if name == "none"
                    else speed([_faster(r) for r in records] if flagged else records, baseline, samples=200),
                    exact=None
                    if temperature or name == "none"
                    else ExactMatch(39, 40, [Divergence("coding-1", 0, 17, 0.004)]),
                    prefill_s=1.0 if name == "none" else 1.2,
                    decode_s=60.0,
                    variant=variant if variant and name.endswith(variant) else "",
                    prefills=40,
                    prompt_tokens=40 * 80,
                    memory=_memory(family, setting),
                    by_prompt=[]
                    if name == "none"
                    else by_length(once(records), once(baseline), lengths, [64, 100], samples=200),
                    timings=round_times(records),
                )
            )
    pieces = [("Sure", 0), ("!\n", 1), ("print", 2), ("(<b>", 3), ("مرح", 4), ("با", 0), ("<|im_end|>", 1)]
    notes = [f"ngram at {e.setting}: {e.speed.flag}" for e in entries if e.speed and e.speed.flag]
    return EvalResult(
        target="smollm2-135m",
        run="eagle3-smollm2",
        recipe="quickstart",
        family="eagle3",
        suite={"name": "core", "k": [4], "temperatures": [0.0, 1.0]},
        prompts=40,
        categories=dict.fromkeys(CATEGORIES, 5),
        drafts=entries,
        texts=[
            AnswerText(name, f"{c}-0", c, 0, "Say <hello> & show code", pieces * 12, "stop")
            for c in CATEGORIES[:3]
            for name in ("eagle3-smollm2", "ngram")
        ],
        hardware="a processor (2 cores)",
        versions={"torch": "2.13.0", "transformers": "5.24.0"},
        commit="0123456789ab",
        date="2026-01-02T03:04:05+00:00",
        notes=notes,
    )


def _memory(family: str, setting: Setting) -> Memory:
    weights, per_token = {"": (270_000_000, 46_000), "eagle3": (39_000_000, 1_500)}.get(family, (0, 0))
    return Memory(weights, per_token * setting.batch * 200, setting.batch, 200)


def _rounds(
    rng: random.Random, requests: dict[str, str], alpha: float, draft_s: float, rare: bool, setting: Setting
) -> list[RoundRecord]:
    """Every round is full: `batch` rows of different requests, which take one time together."""
    rounds = []
    batch, most = setting.batch, setting.k
    names = list(requests)
    for first in range(0, len(names), batch):
        rows = [
            list(_answer(rng, name, alpha * (0.8 + 0.05 * ((first + i) // 5) if alpha < 1 else 1.0), rare, most))
            for i, name in enumerate(names[first : first + batch])
        ]
        for number in range(max(map(len, rows))):
            together = [row[number] for row in rows if number < len(row)]
            width = 1 + max(record.proposed for record in together)
            verify_s = (0.03 + 0.003 * len(together) + 0.0006 * len(together) * width) * rng.uniform(0.95, 1.05)
            drafting = draft_s * most / 4 if width > 1 else 0.0
            rounds += [
                replace(r, batch=len(together), draft_s=drafting, verify_s=verify_s, host_s=0.0008) for r in together
            ]
    return rounds


def _answer(
    rng: random.Random, request: str, alpha: float, rare: bool, most: int, tokens: int = 80
) -> Iterator[RoundRecord]:
    left, number = tokens, 0
    while left > 0:
        proposed = 0 if not alpha or (rare and rng.random() < 0.6) else min(most, left - 1)
        accepted = 0
        while accepted < proposed and rng.random() < (0.8 if rare else alpha * 0.97**accepted):
            accepted += 1
        left -= accepted + 1
        yield _record(
            request, proposed=proposed, accepted=accepted, number=number, reason=None if left > 0 else "length"
        )
        number += 1


def _faster(record: RoundRecord) -> RoundRecord:
    return replace(record, verify_s=0.005)
