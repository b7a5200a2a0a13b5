"""What a real vLLM does with broken exports, beside what the doctor says of them: its claims are evidence.

Run with `python -m pytest tests/serving/test_broken.py -m serving -s`, which prints the table that is in LOG.md. Target
and drafts are tiny and in fp32; the sound drafts are briefly fitted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.draft import open_draft
from drafttrain.export.doctor.finding import Finding, Severity
from drafttrain.export.doctor.registry import lint
from drafttrain.export.doctor.target import TargetFacts
from drafttrain.export.prove.environment import ServerEnvironment
from drafttrain.export.prove.prove import server_runs
from drafttrain.export.prove.server import PLAIN, Counters, ServerError, ServerRun
from drafttrain.export.sidecar import read_sidecar
from drafttrain.export.vllm import METHODS
from drafttrain.modeling.vocab_map import VocabMap
from eval.broken_exports import CUT_OFF, CUT_OFF_RULE, FAULTS, spoil
from tests.serving.cases import NEW, VOCAB, K, exported, fitted, tiny

pytestmark = [pytest.mark.serving, pytest.mark.timeout(3600)]

DRAFTS: dict[str, tuple[DrafterConfig, int]] = {
    "eagle3": (Eagle3Config(taps=(1, 3, 6), draft_vocab_size=96), 40),
    "eagle1": (Eagle1Config(depth=3), 25),
}
REFUSED, NOTHING, LESS, AS_MUCH = "refused", "nothing", "less", "as much"
"""The server does not load or stops; it accepts under a tenth of what the sound draft does in a round; under nineteen
twentieths; or neither: a fault that harms elsewhere, or other drafts more."""
CHANCE = (NOTHING, LESS, AS_MUCH)
"""Of parts that stay as memory happens to be. Nothing, when it was measured."""
WANTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "absolute-d2t": ("eagle3", (REFUSED,)),
    "no-d2t": ("eagle3", (NOTHING,)),
    "other-t2d": ("eagle3", (AS_MUCH,)),
    "fc-width": ("eagle3", (REFUSED,)),
    "shifted-layer-ids": ("eagle3", (LESS,)),
    "no-layer-ids": ("eagle3", (LESS,)),
    "rotary-base": ("eagle3", (LESS,)),
    "no-norm": ("eagle3", (AS_MUCH,)),
    "centred-norms": ("eagle3", (NOTHING, LESS)),
    "bias-key": ("eagle3", CHANCE),
    "no-head": ("eagle3", (NOTHING,)),
    "architecture": ("eagle3", (REFUSED,)),
    "nan": ("eagle3", (NOTHING,)),
    "lost-matrix": ("eagle3", CHANCE),
    "copied-layer-count": ("eagle3", CHANCE),
    "tokenizer-sized-vocabulary": ("eagle3", (REFUSED,)),
    CUT_OFF: ("eagle3", (REFUSED,)),
    "shipped-head": ("eagle1", (REFUSED,)),
}


@dataclass(frozen=True)
class Outcome:
    """sound: counters of the draft that the fault was put into. server: what vLLM did. findings: of the doctor."""

    sound: Counters
    server: ServerRun | ServerError
    findings: list[Finding]

    @property
    def kind(self) -> str:
        """In a word."""
        if isinstance(self.server, ServerError):
            return REFUSED
        counters = self.server.counters
        assert counters is not None
        share = (counters.mean_length - 1) / (self.sound.mean_length - 1)
        return NOTHING if share < 0.1 else LESS if share < 0.95 else AS_MUCH


@pytest.fixture(scope="module")
def outcomes(environment: ServerEnvironment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """All of them, in one start of the server."""
    folder = tmp_path_factory.mktemp("broken")
    rope = {"rope_type": "default", "rope_theta": 500000.0}
    model = tiny(folder / "target", rope_parameters=rope)
    facts = TargetFacts.of_config(str(model.folder), model.target.config)
    said = torch.bincount(torch.cat(model.documents), minlength=VOCAB)
    jobs: dict[str, dict[str, Any] | None] = {PLAIN: None}
    found: dict[str, list[Finding]] = {}

    def job(name: str, draft: Path) -> None:
        jobs[name] = {"method": METHODS[config.family], "model": str(draft), "num_speculative_tokens": K}
        found[name] = lint(Case(open_draft(draft), facts, about=read_sidecar(draft)))

    for base, (config, steps) in DRAFTS.items():
        size = getattr(config, "draft_vocab_size", None)
        vocab_map = None if size is None else VocabMap.from_counts(said, size)
        good = exported(fitted(config, model, steps, vocab_map), model, folder / base)
        job(base, good)
        for name, (wanted_base, _) in WANTED.items():
            if wanted_base == base:
                job(name, spoil(good, folder / name, name))
    runs = server_runs(environment, model.target, model.folder, model.prompts, jobs, k=K, max_new_tokens=NEW)
    plain = runs[PLAIN]
    assert isinstance(plain, ServerRun), plain
    sound: dict[str, Counters] = {}
    for base in DRAFTS:
        run = runs[base]
        assert isinstance(run, ServerRun) and run.counters is not None, run
        assert found[base] == [] and run.outputs == plain.outputs
        sound[base] = run.counters
    for name, run in runs.items():
        # Speculation never changes what is said, however broken the draft.
        assert isinstance(run, ServerError) or run.outputs == plain.outputs, name
    return {name: Outcome(sound[base], runs[name], found[name]) for name, (base, _) in WANTED.items()}


@pytest.mark.parametrize("name", WANTED)
def test_what_the_doctor_names_is_what_the_server_suffers(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    rule = CUT_OFF_RULE if name == CUT_OFF else FAULTS[name].rule
    named = [finding for finding in outcome.findings if finding.rule == rule]
    print(f"\n| {name} | {', '.join(finding.rule for finding in outcome.findings)} | {_said(outcome)} |")
    assert named and named[0].severity in (Severity.error, Severity.warning)
    assert outcome.kind in WANTED[name][1]


def test_a_sound_draft_is_not_accused_and_most_faults_tell(outcomes: dict[str, Outcome]) -> None:
    kinds = [outcome.kind for outcome in outcomes.values()]
    assert sum(kind in (REFUSED, NOTHING, LESS) for kind in kinds) >= 10
    assert sum(kind in (REFUSED, NOTHING) for kind in kinds) >= 7


def _said(outcome: Outcome) -> str:
    run = outcome.server
    if isinstance(run, ServerError):
        return f"refused: {run.what.partition(': ')[2][:90]}"
    assert run.counters is not None
    found, sound = run.counters, outcome.sound
    return f"{found.accepted} accepted in {found.drafts} rounds (sound: {sound.accepted} in {sound.drafts})"
