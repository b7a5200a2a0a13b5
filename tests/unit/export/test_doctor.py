"""The doctor's lint: a sound export is clean, each trap is named, what can be mended is, foreign layouts are read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.drafters.saving import save_draft
from drafttrain.export.doctor.case import Case, engine_for
from drafttrain.export.doctor.draft import open_draft
from drafttrain.export.doctor.finding import Finding, Severity
from drafttrain.export.doctor.mending import mend_case, relint, write_copy
from drafttrain.export.doctor.registry import lint
from drafttrain.export.doctor.rules import trtllm
from drafttrain.export.doctor.served import Unserved, as_served
from drafttrain.export.doctor.target import TargetFacts
from drafttrain.export.sidecar import read_sidecar
from drafttrain.export.trtllm import OPTIONS
from drafttrain.export.write import export_draft
from drafttrain.files import read_json
from drafttrain.modeling.vocab_map import VocabMap
from eval.broken_exports import CUT_OFF, CUT_OFF_RULE, FAULTS, fits, spoil
from tests.draft_support import new_draft
from tests.support import VOCAB, tiny_target

LAYERS = 8
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 250000.0}}
CONFIGS: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(draft_vocab_size=30),
    "eagle3-full": Eagle3Config(fc_norm=True, norm_output=True),
    "eagle3-taps": Eagle3Config(taps=(1, 3, 6)),
    "eagle3-two": Eagle3Config(taps=(6, 1), norm_before_fc=True),
    "eagle1": Eagle1Config(depth=3),
    "medusa": MedusaConfig(num_heads=3, num_layers=2),
    "draft_lm": DraftLMConfig(layers=(0, 3)),
}


MENDABLE = [
    "absolute-d2t",
    "other-t2d",
    "full-map",
    "no-draft-vocab-size",
    "shifted-layer-ids",
    "no-layer-ids",
    "rotary-base",
    "no-rotary",
    "two-rotary-bases",
    "bias-key",
    "tied-head",
    "tokenizer-sized-vocabulary",
    "short-context",
    "architecture",
    "quantised",
    "copied-layer-count",
    "shipped-head",
    "too-many-heads",
]


TARGET = tiny_target("llama", num_hidden_layers=LAYERS, **ROPE)
FACTS = TargetFacts.of_config("some/target", TARGET.config, stop_ids=frozenset({3}))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Exports of every family, made once."""
    root, made = tmp_path_factory.mktemp("sound"), {}

    def make(name: str, engine: str = "vllm") -> Path:
        if (name, engine) not in made:
            small = VocabMap.from_ids(range(1, 60, 2), VOCAB) if name == "eagle3" else None
            draft = new_draft(CONFIGS[name], TARGET, vocab_map=small)
            identity = {"name": "some/target", "vocab_size": VOCAB, "hidden_size": 32, "n_layers": LAYERS}
            run = root / f"{name}-{engine}"
            save_draft(run / "draft", draft, target=identity)
            (written,) = export_draft(run, [engine])
            made[name, engine] = written.folder
        return made[name, engine]

    return make


def case_of(folder: Path, engine: str = "vllm", record: bool = True, **changes: Any) -> Case:
    known = replace(FACTS, **changes)
    return Case(open_draft(folder), known, engine, read_sidecar(folder) if record else None)


def rules(findings: list[Finding]) -> set[str]:
    return {finding.rule for finding in findings}


def bases(fault: str, sound: Callable[..., Path]) -> list[Path]:
    """The sound exports that can be given a fault."""
    engine = FAULTS[fault].engine
    made = [(config.family, sound(name, engine)) for name, config in CONFIGS.items() if name not in LACKS[engine]]
    return [export for family, export in made if fits(FAULTS[fault], export, engine, family)]


LACKS = {"vllm": (), "sglang": ("medusa",), "trtllm": ("medusa", "eagle1")}


@pytest.mark.parametrize("engine", LACKS)
def test_sound_exports_are_clean(engine: str, sound: Callable[..., Path]) -> None:
    """Judged for the engine that they were written for without being told."""
    for name in CONFIGS:
        if name not in LACKS[engine]:
            folder = sound(name, engine)
            assert engine_for(open_draft(folder), read_sidecar(folder)) == engine
            assert lint(case_of(folder, engine)) == [], name


@pytest.mark.parametrize("name", FAULTS)
def test_each_trap_is_named(name: str, sound: Callable[..., Path], tmp_path: Path) -> None:
    good = bases(name, sound)
    assert good
    for number, base in enumerate(good):
        found = lint(case_of(spoil(base, tmp_path / str(number), name), FAULTS[name].engine))
        (named,) = [finding for finding in found if finding.rule == FAULTS[name].rule]
        assert named.severity in (Severity.error, Severity.warning)
        assert all(finding.what and finding.why and finding.remedy for finding in found)


def test_each_rule_for_tensorrt_llm_has_a_trap() -> None:
    """Its own, and those that judge it otherwise than the others."""
    own = {rule.id for rule in trtllm.RULES}
    assert {fault.rule for fault in FAULTS.values() if fault.engine == "trtllm"} == own | {
        "engine-lacks",
        "layer-count",
        "layer-ids-convention",
        "layer-ids-range",
        "norm-switches",
    }


@pytest.mark.parametrize("name", MENDABLE)
def test_what_can_be_mended_is(name: str, sound: Callable[..., Path], tmp_path: Path) -> None:
    """The mended copy is the sound export again: the same tensors, and a config that means the same."""
    for number, base in enumerate(bases(name, sound)):
        broken = case_of(spoil(base, tmp_path / f"broken{number}", name))
        found = mend_case(broken)
        assert FAULTS[name].rule in rules(found.mended)
        out = tmp_path / f"mended{number}"
        write_copy(found.case.draft, out)
        assert relint(broken, out) == found.left == []
        tensors, wanted = load_file(out / "model.safetensors"), load_file(base / "model.safetensors")
        assert set(tensors) | {"t2d"} == set(wanted) | {"t2d"}
        assert all(torch.equal(tensors[key], wanted[key]) for key in tensors)
        assert {path.name for path in out.iterdir()} == {path.name for path in base.iterdir()}
        config, meant = read_json(out / "config.json"), read_json(base / "config.json")
        assert {key for key in meant if config.get(key) != meant[key]} <= {"eagle_config", "architectures"}
        assert (broken.draft.folder / "model.safetensors").is_file()  # the patient is left as it was


def spoilt_options(sound: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a TensorRT-LLM export that says that it lies where it lies, with other options; None takes one out."""
    shutil.copytree(sound, folder)
    options = yaml.safe_load((folder / OPTIONS).read_text())
    changed = {**options["speculative_config"], "speculative_model": str(folder), **changes}
    kept = {key: value for key, value in changed.items() if value is not None}
    (folder / OPTIONS).write_text(yaml.safe_dump({"speculative_config": kept}))
    return folder


@pytest.mark.parametrize(
    ("name", "changes", "rule"),
    [
        # Taps 1, 3 and 6 are outputs of layers 0, 2 and 5.
        ("eagle3-taps", {"eagle3_layers_to_capture": [1, 3, 6]}, "layer-ids-convention"),
        ("eagle3-taps", {"eagle3_layers_to_capture": None}, "layer-ids-convention"),
        ("eagle3", {"eagle3_layers_to_capture": [2, 4, 5]}, "layer-ids-convention"),
        ("eagle3", {"decoding_type": "Draft_Target"}, "options"),
        ("draft_lm", {"decoding_type": None}, "options"),
        ("eagle3", {"speculative_model": "/models/another"}, "options-place"),
    ],
)
@pytest.mark.parametrize("record", [True, False])
def test_options_of_tensorrt_llm_are_judged_and_mended(
    name: str, changes: dict[str, Any], rule: str, record: bool, sound: Callable[..., Path], tmp_path: Path
) -> None:
    broken = case_of(spoilt_options(sound(name, "trtllm"), tmp_path / "broken", **changes), "trtllm", record)
    if name == "eagle3-taps" and not record:
        assert lint(broken) == []  # any layers may be meant
        return
    assert rules(lint(broken)) == {rule}
    write_copy(mend_case(broken).case.draft, tmp_path / "mended")
    assert relint(broken, tmp_path / "mended") == []
    written = yaml.safe_load((sound(name, "trtllm") / OPTIONS).read_text())["speculative_config"]
    mended = yaml.safe_load((tmp_path / "mended" / OPTIONS).read_text())["speculative_config"]
    default = {"eagle3_layers_to_capture": [1, 3, 4]} if changes.get("eagle3_layers_to_capture") == [2, 4, 5] else {}
    assert mended == {**written, **default, "speculative_model": str(tmp_path / "mended")}


def test_what_tensorrt_llm_would_run_of_a_folder(sound: Callable[..., Path], tmp_path: Path) -> None:
    """The states that its options name, or its default; the norm of fc's input by `eagle_config` alone."""
    for name, taps in (("eagle3", "2 4 5"), ("eagle3-taps", "1 3 6"), ("eagle3-two", "1 6")):
        served = as_served(case_of(sound(name, "trtllm"), "trtllm"), TARGET, 3).ir
        meant = as_served(case_of(sound(name)), TARGET, 3).ir
        assert " ".join(map(str, served.taps)) == taps and served.taps == meant.taps and served.norms == meant.norms
        assert {key: tensor.shape for key, tensor in served.tensors.items()} == {
            key: tensor.shape for key, tensor in meant.tensors.items()
        }
    folder = spoilt_options(sound("eagle3-taps", "trtllm"), tmp_path / "late", eagle3_layers_to_capture=[1, 3, 6])
    assert " ".join(map(str, as_served(case_of(folder, "trtllm"), TARGET, 3).ir.taps)) == "2 4 7"


def test_what_was_written_for_another_engine_than_tensorrt_llm(sound: Callable[..., Path]) -> None:
    found = {finding.rule: finding for finding in lint(case_of(sound("eagle3-taps"), "trtllm"))}
    assert set(found) == {"torch-dtype", "layer-ids-convention"}
    assert "write [0, 2, 5]" in found["layer-ids-convention"].remedy
    assert {"torch-dtype", "norm-switches"} <= rules(lint(case_of(sound("eagle3-two"), "trtllm")))
    for name, family in (("eagle1", "EAGLE-1"), ("medusa", "Medusa")):
        case = case_of(sound(name), "trtllm")
        assert f"TensorRT-LLM has no {family}" in [finding.why for finding in lint(case)]
        with pytest.raises(Unserved, match=family):
            as_served(case, TARGET, 3)


def test_options_that_cannot_be_read(sound: Callable[..., Path], tmp_path: Path) -> None:
    folder = shutil.copytree(sound("eagle3", "trtllm"), tmp_path / "broken")
    for text, said in (("a: [", "cannot be read"), ("a: 1", "holds no speculative_config")):
        (folder / OPTIONS).write_text(text)
        (found,) = lint(case_of(folder, "trtllm"))
        assert found.rule == "incomplete" and OPTIONS in found.what and said in found.what
    (folder / OPTIONS).write_text("speculative_config: {decoding_type: Eagle3, eagle3_layers_to_capture: all}")
    assert [finding.what.split(" ")[0] for finding in lint(case_of(folder, "trtllm")) if finding.rule == "options"] == [
        "max_draft_len",
        "eagle3_layers_to_capture",
    ]


def test_a_file_that_is_cut_off(sound: Callable[..., Path], tmp_path: Path) -> None:
    (found,) = lint(case_of(spoil(sound("eagle3"), tmp_path / "broken", CUT_OFF)))
    assert found.rule == CUT_OFF_RULE and "its header promises" in found.what and not found.fixable
