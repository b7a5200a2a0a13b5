"""The trial: rounds on paper are the engine's, and the reading that a draft was trained in is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.diagnose import run_trial
from drafttrain.export.doctor.draft import open_draft
from drafttrain.export.doctor.finding import Mend
from drafttrain.export.doctor.mending import mend_case
from drafttrain.export.doctor.registry import lint
from drafttrain.export.doctor.served import as_served
from drafttrain.export.doctor.target import TargetFacts
from drafttrain.export.doctor.trial import Answers
from drafttrain.export.prove.bundled import run_bundled
from drafttrain.export.sidecar import read_sidecar
from drafttrain.modeling.vocab_map import VocabMap
from eval.broken_exports import spoil
from tests.serving.cases import VOCAB, K, Tiny, exported, fitted, tiny

NEW = 32
CONFIGS: dict[str, tuple[DrafterConfig, int]] = {
    "eagle3": (Eagle3Config(taps=(1, 3, 6), draft_vocab_size=96, norm_output=True), 40),
    "eagle1": (Eagle1Config(depth=3), 25),
    "medusa": (MedusaConfig(num_heads=3, num_layers=1), 25),
    "draft_lm": (DraftLMConfig(layers=(0, 1, 7)), 4),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return tiny(
        tmp_path_factory.mktemp("trial") / "target", rope_parameters={"rope_type": "default", "rope_theta": 50.0}
    )


@pytest.fixture(scope="module")
def answers(model: Tiny) -> Answers:
    return Answers(model.target, model.prompts, k=K, max_new_tokens=NEW, stop_ids={9})


@pytest.fixture(scope="module")
def sound(model: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Exports of briefly fitted drafts, made once."""
    made: dict[str, Path] = {}
    said = torch.bincount(torch.cat(model.documents), minlength=VOCAB)

    def make(name: str) -> Path:
        if name not in made:
            config, steps = CONFIGS[name]
            size = getattr(config, "draft_vocab_size", None)
            vocab_map = None if size is None else VocabMap.from_counts(said, size)
            made[name] = exported(fitted(config, model, steps, vocab_map), model, tmp_path_factory.mktemp(name))
        return made[name]

    return make


def case_of(folder: Path, model: Tiny) -> Case:
    facts = TargetFacts.of_config(str(model.folder), model.target.config)
    return Case(open_draft(folder), facts, about=read_sidecar(folder))


@pytest.mark.parametrize("name", CONFIGS)
def test_rounds_on_paper_are_the_engines(
    name: str, model: Tiny, answers: Answers, sound: Callable[[str], Path]
) -> None:
    """Ends and limits included; what is served is the export, not the run's draft."""
    served = as_served(case_of(sound(name), model), model.target, K)
    paper = answers.accepted(served.drafter(model.target))
    engine = run_bundled(
        model.target, served.drafter(model.target), model.prompts, k=K, max_new_tokens=NEW, rows=8, stop_ids={9}
    )
    assert answers.outputs == engine.outputs
    assert paper.counters == engine.counters and paper.counters.accepted > 0


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("shifted-layer-ids", "[1, 3, 6]"),
        ("absolute-d2t", "subtract"),
        ("rotary-base", "the target's"),
        ("centred-norms", "add 1"),
    ],
)
def test_the_fault_is_found_by_what_mends_it(
    fault: str, said: str, model: Tiny, sound: Callable[[str], Path], tmp_path: Path
) -> None:
    """Without the lint's help: only what is accepted tells."""
    broken = case_of(spoil(sound("eagle3"), tmp_path / "broken", fault), model)
    case = replace(broken, about=None)
    served = as_served(case_of(sound("eagle3"), model), model.target, K)
    good = Answers(model.target, model.prompts, k=K, max_new_tokens=NEW).accepted(served.drafter(model.target)).counters
    trial = run_trial(case, [], model.target, model.prompts, k=K, max_new_tokens=NEW)
    if fault == "absolute-d2t":  # an engine crashes on it, and the rules mend it
        assert trial.counters is None and trial.tried[0].counters == good
        return
    found = [one for one in trial.findings if one.rule == "reading"]
    assert trial.counters is not None and trial.counters.accepted < good.accepted
    assert said in found[0].what
    mended = as_served(mend_case(case, found).case, model.target, K).drafter(model.target)
    assert Answers(model.target, model.prompts, k=K, max_new_tokens=NEW).accepted(mended).counters == good


def test_a_sound_draft_is_read_as_it_lies_there(model: Tiny, sound: Callable[[str], Path]) -> None:
    for name in CONFIGS:
        trial = run_trial(case_of(sound(name), model), [], model.target, model.prompts, k=K, max_new_tokens=NEW)
        assert trial.counters is not None and trial.findings == [], name
        assert not any(one.better for one in trial.tried)


def test_a_mend_that_makes_it_worse_is_overruled(model: Tiny, sound: Callable[[str], Path]) -> None:
    """A draft that was really trained with another base than its target's is right as it is."""
    case = case_of(sound("eagle3"), model)
    other = replace(case, target=replace(case.facts, rope={"rope_type": "default", "rope_theta": 10000.0}))
    findings = lint(other)
    assert [finding.rule for finding in findings] == ["rope-theta"]
    trial = run_trial(other, findings, model.target, model.prompts, k=K, max_new_tokens=NEW)
    assert trial.overruled == {"rope-theta"} and trial.findings == []


def test_what_it_claims(model: Tiny, sound: Callable[[str], Path], tmp_path: Path) -> None:
    case = case_of(sound("eagle3"), model)
    broken = case_of(spoil(sound("eagle3"), tmp_path / "broken", "rotary-base"), model)
    claims = {"source": "suite core", "unconditional": [0.99, 0.98, 0.97, 0.96]}
    boasting = replace(broken, about={**(case.about or {}), "forecast": claims})
    trial = run_trial(boasting, [], model.target, model.prompts, k=K, max_new_tokens=NEW)
    found, reading = trial.findings
    assert (
        reading.rule == "reading"
        and found.rule == "below-claim"
        and "99.0%" in found.what
        and "suite core" in found.what
    )
    assert trial.claim is not None and len(trial.claim["per_position"]) == K
    honest = {"source": "suite core", "unconditional": [0.3, 0.1, 0.05]}
    modest = replace(case, about={**(case.about or {}), "forecast": honest})
    assert run_trial(modest, [], model.target, model.prompts, k=K, max_new_tokens=NEW).findings == []


def test_a_draft_that_accepts_nothing(model: Tiny, sound: Callable[[str], Path]) -> None:
    case = case_of(sound("eagle3"), model)
    noise = {"lm_head.weight": torch.randn(96, 64, generator=torch.Generator().manual_seed(3))}
    lost = replace(case, draft=case.draft.mended(Mend(tensors=noise)))
    trial = run_trial(lost, [], model.target, model.prompts, k=K, max_new_tokens=NEW)
    assert [finding.rule for finding in trial.findings] == ["accepts-nothing"]


def test_what_no_engine_would_run(model: Tiny, sound: Callable[[str], Path]) -> None:
    case = case_of(sound("eagle3"), model)
    lost = replace(case, draft=case.draft.mended(Mend(drop_tensors=("midlayer.mlp.up_proj.weight",))))
    trial = run_trial(lost, [], model.target, model.prompts, k=K, max_new_tokens=NEW)
    assert trial.counters is None and "as memory happens to be" in trial.why
    assert [finding.rule for finding in trial.findings] == ["not-served"]
    assert trial.to_json()["why_not"] == trial.why
