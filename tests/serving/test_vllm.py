"""Every family in a real vLLM: the same output as without a draft, the same acceptance as in the bundled engine.

Run with `python -m pytest tests/serving -m serving`. Target and drafts are tiny and in fp32, so that the counts of both
engines have to be equal, not only alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.export.prove.bundled import BundledRun
from drafttrain.export.prove.compare import compare
from drafttrain.export.prove.environment import ServerEnvironment
from drafttrain.export.prove.prove import bundled_run, check_export, server_runs, speculative_config
from drafttrain.export.prove.server import PLAIN, ServerError, ServerRun
from drafttrain.export.tap_ids import KEY
from drafttrain.files import read_json, write_json
from drafttrain.modeling.vocab_map import VocabMap
from tests.serving.cases import LAYERS, NEW, VOCAB, K, exported, fitted, tiny

pytestmark = [pytest.mark.serving, pytest.mark.timeout(3600)]

CASES: dict[str, tuple[DrafterConfig, int]] = {
    "eagle3": (Eagle3Config(), 20),
    "eagle3-small": (Eagle3Config(draft_vocab_size=96), 20),
    "eagle3-taps": (Eagle3Config(taps=(6, 1)), 20),  # two, neither default nor in order
    "eagle3-outer": (Eagle3Config(taps=(0, 4, "pre_norm"), norm_before_fc=True), 20),
    "eagle3-3.1": (Eagle3Config(fc_norm=True, norm_output=True), 20),
    "eagle3-layers": (Eagle3Config(num_layers=2, norm_before_residual=True), 20),
    "eagle1": (Eagle1Config(depth=3), 25),
    "medusa": (MedusaConfig(num_heads=3, num_layers=2), 20),
    "medusa-shared": (MedusaConfig(num_heads=3, head="target"), 20),
    "draft_lm": (DraftLMConfig(layers=(0, 1, 7)), 4),
    "draft_lm-target": (DraftLMConfig(layers=tuple(range(LAYERS))), 0),  # the target itself
}
# In the speculators library's format: as the draft of a target, and served by itself, naming its target.
SPECULATORS = {"speculators": "eagle3-small", "speculators-taps": "eagle3-taps", "speculators-3.1": "eagle3-3.1"}
ALONE, ALONE_RUN = "speculators-taps", "alone"
# Exports with one fault each: the proof must not pass them.
BROKEN = ("no-taps", "rotary-base", "full-map")


@dataclass(frozen=True)
class Runs:
    """Of the server (plain and with each draft) and of the bundled engine."""

    server: dict[str, ServerRun | ServerError]
    bundled: dict[str, BundledRun]

    def plain(self) -> ServerRun:
        found = self.server[PLAIN]
        assert isinstance(found, ServerRun), found
        return found


@pytest.fixture(scope="module")
def runs(
    request: pytest.FixtureRequest, environment: ServerEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    """One start of the server for all cases that are asked for."""
    wanted = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    folder = tmp_path_factory.mktemp("vllm")
    model = tiny(folder / "target")
    said = torch.bincount(torch.cat(model.documents), minlength=VOCAB)
    jobs: dict[str, dict[str, Any] | None] = {PLAIN: None}
    ours = {}
    sources = {"no-taps": "eagle3-taps", "rotary-base": "eagle3", "full-map": "eagle3", **SPECULATORS}
    for name in [*CASES, *SPECULATORS, *BROKEN]:
        if name not in wanted:
            continue
        config, steps = CASES[sources.get(name, name)]
        size = getattr(config, "draft_vocab_size", None)
        vocab_map = None if size is None else VocabMap.from_counts(said, size)
        run = folder / name
        engine = "speculators" if name in SPECULATORS else "vllm"
        export = exported(fitted(config, model, steps, vocab_map), model, run, engine)
        ir = check_export(export, run)
        ours[name] = bundled_run(ir, run, model.target, model.prompts, k=K, max_new_tokens=NEW)
        if name in BROKEN:
            spoil(export, name)
        jobs[name] = speculative_config(ir, export, K)
    done = server_runs(environment, model.target, model.folder, model.prompts, jobs, k=K, max_new_tokens=NEW)
    if ALONE in ours:
        served = {ALONE_RUN: {"num_speculative_tokens": K}}
        draft = folder / ALONE / "export" / "speculators"
        done |= server_runs(environment, model.target, draft, model.prompts, served, k=K, max_new_tokens=NEW)
    return Runs(done, ours)


def spoil(export: Path, fault: str) -> None:
    """Put one fault into an export."""
    config, weights = read_json(export / "config.json"), export / "model.safetensors"
    match fault:
        case "no-taps":  # the ids of the other engine's convention
            config[KEY] = config["eagle_config"][KEY]
        case "rotary-base":
            config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 50.0
        case "full-map":
            full = VocabMap.full(config["vocab_size"]).state()
            save_file({**load_file(weights), **full}, weights, metadata={"format": "pt"})
    write_json(export / "config.json", config)


@pytest.mark.parametrize("name", [*CASES, *SPECULATORS])
def test_the_server_does_what_the_bundled_engine_measures(name: str, runs: Runs) -> None:
    found = runs.server[name]
    assert isinstance(found, ServerRun), found
    proof = compare(runs.plain(), found, runs.bundled[name], {"dtype": "float32"})
    print(f"{name}: server {proof.server}, bundled {proof.bundled}")
    assert proof.problems == []
    assert proof.differences == [] and proof.against_bundled == []
    assert proof.server == proof.bundled
    assert proof.server.accepted > 0
    assert (proof.server.accepted == proof.server.proposed) == (name == "draft_lm-target")


@pytest.mark.parametrize("name", [ALONE])
def test_a_speculators_folder_is_all_the_server_needs(name: str, runs: Runs) -> None:
    """`vllm serve DRAFT`: the folder names its target."""
    found = runs.server[ALONE_RUN]
    assert isinstance(found, ServerRun), found
    assert found.outputs == runs.plain().outputs
    assert found.counters == runs.bundled[name].counters


@pytest.mark.parametrize("name", ["no-taps", "rotary-base"])
def test_a_silent_fault_is_found(name: str, runs: Runs) -> None:
    """The output stays right, so that only acceptance tells."""
    found = runs.server[name]
    assert isinstance(found, ServerRun), found
    proof = compare(runs.plain(), found, runs.bundled[name], {"dtype": "float32"})
    print(f"{name}: server {proof.server}, bundled {proof.bundled}")
    assert proof.differences == [] and not proof.same_counts
    assert proof.server.accepted < proof.bundled.accepted


@pytest.mark.parametrize("name", ["full-map"])
def test_a_full_vocabulary_map_is_refused(name: str, runs: Runs) -> None:
    assert isinstance(runs.server[name], ServerError)
    assert "draft_id_to_target_id" in str(runs.server[name])
