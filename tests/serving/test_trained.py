"""Trained drafts of the embedded target in a real vLLM: SmolLM2-135M, the vocabulary and the tied head of a real model.

Run with `python -m pytest tests/serving/test_trained.py -m serving`. Each draft is trained here for some steps on the
target's own answers, to which it is then put: seconds, and enough that acceptance is neither none nor all. Drafts
that a recipe trained are proven by `drafttrain prove RUN/export/vllm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from drafttrain.cli.common import first_turns
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.engine.generation import TargetGenerator
from drafttrain.export.prove.bundled import BundledRun
from drafttrain.export.prove.compare import compare
from drafttrain.export.prove.environment import ServerEnvironment
from drafttrain.export.prove.prove import bundled_run, check_export, server_runs, speculative_config
from drafttrain.export.prove.server import PLAIN, ServerError, ServerRun
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.targets import embedded
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import load_target
from tests.serving.cases import K, Tiny, exported, fitted

pytestmark = [pytest.mark.serving, pytest.mark.timeout(3600)]

PROMPTS, NEW = 3, 32
# Config, steps, learning rate.
CASES: dict[str, tuple[DrafterConfig, int, float]] = {
    "eagle3": (Eagle3Config(init_fc="last"), 12, 2e-3),
    "eagle3-3.1": (Eagle3Config(taps=(1, 12, 27), draft_vocab_size=2048, fc_norm=True, norm_output=True), 25, 2e-3),
    "eagle1": (Eagle1Config(depth=K, init_fc="feature"), 12, 1e-3),
    "medusa": (MedusaConfig(num_heads=K, head="target"), 12, 3e-3),
    "draft_lm": (DraftLMConfig(layers=(0, 1, 2, 28, 29)), 12, 1e-3),
}


@dataclass(frozen=True)
class Runs:
    """Of the server (plain and with each draft) and of the bundled engine."""

    server: dict[str, ServerRun | ServerError]
    bundled: dict[str, BundledRun]


@pytest.fixture(scope="module")
def runs(environment: ServerEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One start of the server for all of them, in fp32."""
    folder = tmp_path_factory.mktemp("trained")
    target = load_target(TargetConfig(model=embedded.NAME, dtype="float32", device="cpu"))
    # The shortest of some: what is trained on costs as much as what is answered.
    prompts = sorted(first_turns(target, "data/prompts/train.jsonl", 12), key=len)[:PROMPTS]
    answers = {
        said.prompt: said.tokens for said in TargetGenerator(target).generate(prompts, max_new_tokens=NEW + K + 1)
    }
    documents = [torch.tensor([*ids, *answers[i]]) for i, ids in enumerate(prompts)]
    model = Tiny(target, embedded.embedded_folder(), prompts, documents)
    said = torch.bincount(torch.cat(documents), minlength=target.vocab_size)
    length = max(map(len, documents))
    jobs: dict[str, dict[str, Any] | None] = {PLAIN: None}
    ours = {}
    for name, (config, steps, lr) in CASES.items():
        size = getattr(config, "draft_vocab_size", None)
        vocab_map = None if size is None else VocabMap.from_counts(said, size)
        run = folder / name
        draft = fitted(config, model, steps, vocab_map, lr=lr, spread=False, length=length)
        export = exported(draft, model, run)
        ir = check_export(export, run)
        ours[name] = bundled_run(ir, run, target, prompts, k=K, max_new_tokens=NEW)
        jobs[name] = speculative_config(ir, export, K)
    return Runs(server_runs(environment, target, model.folder, prompts, jobs, k=K, max_new_tokens=NEW), ours)


@pytest.mark.parametrize("name", CASES)
def test_a_trained_draft_is_proven(name: str, runs: Runs) -> None:
    """The output of plain greedy, and the acceptance that the bundled engine measures."""
    plain, found = runs.server[PLAIN], runs.server[name]
    assert isinstance(plain, ServerRun) and isinstance(found, ServerRun), found
    proof = compare(plain, found, runs.bundled[name], {"dtype": "float32"})
    print(f"{name}: server {proof.server}, bundled {proof.bundled}")
    assert proof.problems == [] and proof.proven
    # Neither a draft that says nothing nor one that is the target.
    assert 0 < proof.server.accepted < proof.server.proposed
