"""Round records for tests, written as short as what they say, and a simulated evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from drafttrain.bench.divergence import Divergence, ExactMatch
from drafttrain.bench.metrics import acceptance, by_category
from drafttrain.bench.result import AnswerText, DraftResult, EvalResult, Setting
from drafttrain.bench.speed import speed, time_split
from drafttrain.engine.records import RoundRecord

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


def simulate(seed: int = 0) -> EvalResult:
    """An `EvalResult` as a run of 40 prompts would give it."""
    rng = random.Random(seed)
    category_of = {f"{name}-{n}": name for name in CATEGORIES for n in range(5)}
    drafts = (("none", "", 0.0, 0.0), ("eagle3-smollm2", "eagle3", 0.62, 0.006), ("ngram", "ngram", 0.2, 0.0))
    entries = []
    for temperature in (0.0, 1.0):
        setting = Setting(4, temperature, 1)
        baseline: list[RoundRecord] = []
        named = (*drafts, ("oracle", "oracle", 1.0, 0.0)) if temperature == 0 else drafts
        for name, family, alpha, draft_s in named:
            records = _rounds(rng, category_of, alpha * (0.9 if temperature else 1), draft_s, family == "ngram")
            baseline = baseline or records
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
                    prefill_s=1.0,
                    decode_s=60.0,
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


def _rounds(
    rng: random.Random, requests: dict[str, str], alpha: float, draft_s: float, rare: bool
) -> list[RoundRecord]:
    rounds = []
    for index, request in enumerate(requests):
        left, number = 80, 0
        skill = min(1.0, alpha * (0.8 + 0.05 * (index // 5))) if alpha < 1 else 1.0
        while left > 0:
            proposed = 0 if not alpha or (rare and rng.random() < 0.6) else min(4, left - 1)
            accepted = 0
            while accepted < proposed and rng.random() < (0.8 if rare else skill * 0.97**accepted):
                accepted += 1
            verify_s = (0.034 + 0.0006 * proposed) * rng.uniform(0.95, 1.05)
            left -= accepted + 1
            rounds.append(
                _record(
                    request,
                    proposed=proposed,
                    accepted=accepted,
                    number=number,
                    reason=None if left > 0 else "length",
                    draft_s=draft_s,
                    verify_s=verify_s,
                    host_s=0.0008,
                )
            )
            number += 1
    return rounds


def _faster(record: RoundRecord) -> RoundRecord:
    return replace(record, verify_s=0.005)
