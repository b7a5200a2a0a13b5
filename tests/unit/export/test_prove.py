"""The proof's own logic, without a server: counting as a server counts, differences, intervals, what may be proven."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafttrain.cli.main import main
from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.saving import save_draft
from drafttrain.engine.records import RoundRecord
from drafttrain.errors import CheckpointError, EngineError, UserError
from drafttrain.export.ir import ExportError
from drafttrain.export.prove import environment, server
from drafttrain.export.prove.bundled import BundledRun, room, run_bundled, server_counts
from drafttrain.export.prove.compare import compare, compare_positions, find_differences, wilson
from drafttrain.export.prove.environment import ServerEnvironment, vllm_environment, vllm_folder
from drafttrain.export.prove.prove import check_export, find_run, server_target
from drafttrain.export.prove.server import Counters, ServerError, ServerRun, run_vllm
from drafttrain.export.write import export_draft
from drafttrain.targets.config import TargetConfig
from tests.draft_support import new_draft
from tests.support import RAGGED_PROMPTS, VOCAB, tiny_target

IDENTITY = {"name": "some/target", "vocab_size": VOCAB, "hidden_size": 32, "n_layers": 8}


def record(request: str, accepted: int, proposed: int = 3) -> RoundRecord:
    return RoundRecord(request, 0, 0, proposed, accepted, accepted + 1, None, 1, 0.0, 0.0, 0.0)


def test_rounds_that_begin_behind_the_end_do_not_count() -> None:
    # The prefill gives one token, the rounds 3, 1 and 4: of six tokens, the last round is begun at five.
    records = [record("a", 2), record("a", 0), record("a", 3), record("a", 3), record("b", 1), record("b", 3)]
    counts = server_counts(records, 3, {"a": 6, "b": 6})
    assert counts == Counters(drafts=5, proposed=15, accepted=9, per_position=[4, 3, 2])
    assert counts.mean_length == 1 + 9 / 5
    assert server_counts(records, 3, {"a": 1, "b": 0}).drafts == 0
    assert server_counts(records, 3, {"a": 6, "b": 3}).drafts == 4


@pytest.mark.parametrize("new_tokens", [1, 2, 9])
def test_a_draft_that_is_its_target_has_every_token_accepted(new_tokens: int) -> None:
    target = tiny_target()
    draft = new_draft(DraftLMConfig(layers=(0, 1, 2, 3)), target)
    draft.load_state_dict({name: tensor for name, tensor in draft.state_dict().items()})
    draft.lm.hf.load_state_dict(target.hf.state_dict())  # type: ignore[union-attr, operator]
    found = run_bundled(target, draft, RAGGED_PROMPTS, k=3, max_new_tokens=new_tokens, rows=4)
    rounds = -(-(new_tokens - 1) // 4) * len(RAGGED_PROMPTS)
    assert found.counters == Counters(rounds, 3 * rounds, 3 * rounds, [rounds] * 3)
    assert all(len(output) == new_tokens for output in found.outputs)


def test_an_output_ends_with_a_stop_token() -> None:
    target = tiny_target()
    draft = new_draft(DraftLMConfig(layers=(0,)), target)
    whole = run_bundled(target, draft, RAGGED_PROMPTS, k=3, max_new_tokens=12, rows=4)
    stop = whole.outputs[0][5]
    ended = run_bundled(target, draft, RAGGED_PROMPTS, k=3, max_new_tokens=12, rows=4, stop_ids={stop})
    for long, short in zip(whole.outputs, ended.outputs, strict=True):
        assert short == (long[: long.index(stop) + 1] if stop in long else long)
    assert ended.counters.drafts < whole.counters.drafts


def test_a_context_without_room_is_refused() -> None:
    target = tiny_target(max_position_embeddings=32)
    draft = new_draft(DraftLMConfig(layers=(0,)), target)
    with pytest.raises(EngineError, match=r"need 34 tokens.*context has 32"):
        run_bundled(target, draft, [[5] * 10], k=3, max_new_tokens=20, rows=4)
    assert room(3) == 4


def test_differences_are_judged_by_the_gap_of_the_plain_run() -> None:
    plain = [[1, 2, 3], [1, 2, 3], [1, 2, 3], [4]]
    other = [[1, 2, 3], [1, 9, 3], [1, 2, 8], [4, 5]]
    gaps = [[1.0] * 3, [1.0, 0.0005, 1.0], [1.0, 1.0, 0.5], [0.0]]
    tie, fault, longer = find_differences(plain, other, gaps, 1e-3)
    assert (tie.prompt, tie.index, tie.plain, tie.speculative, tie.near_tie) == (1, 1, 2, 9, True)
    assert (fault.prompt, fault.index, fault.gap, fault.near_tie) == (2, 2, 0.5, False)
    # An output that is longer is no near-tie, whatever the gap.
    assert (longer.index, longer.plain, longer.speculative, longer.near_tie) == (1, None, 5, False)


def test_wilsons_interval() -> None:
    low, high = wilson(8, 10, z=1.96)
    assert (round(low, 3), round(high, 3)) == (0.490, 0.943)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(0, 50)[0] == 0.0 and wilson(50, 50)[1] == 1.0
    for successes in range(11):
        low, high = wilson(successes, 10)
        assert 0 <= low <= successes / 10 <= high <= 1


def test_positions() -> None:
    same = Counters(100, 300, 90, [60, 25, 5])
    assert all(p.within for p in compare_positions(same, same))
    shifted = Counters(100, 300, 60, [30, 25, 5])
    assert [p.within for p in compare_positions(shifted, same)] == [False, True, True]
    short = Counters(100, 200, 85, [60, 25])
    assert [p.server for p in compare_positions(short, same)] == [0.6, 0.25, 0.0]


def test_the_verdict() -> None:
    counts = Counters(10, 30, 12, [7, 4, 1])
    plain = ServerRun([[1, 2]], [[1.0, 1.0]], None, 0.0, 0.0)
    speculative = ServerRun([[1, 2]], None, counts, 0.0, 0.0)
    ours = BundledRun([[1, 2]], counts)
    setting = {"dtype": "float32", "prompts": 1}
    proof = compare(plain, speculative, ours, setting)
    assert proof.proven and proof.same_counts and proof.to_json()["proven"] is True
    json.dumps(proof.to_json())
    other = compare(plain, replace(speculative, outputs=[[1, 3]]), ours, setting)
    assert not other.proven and "token 1 is 3 with speculation and 2 without" in other.problems[0]
    nothing = Counters(10, 30, 0, [0, 0, 0])
    vacuous = compare(plain, replace(speculative, counters=nothing), BundledRun([[1, 2]], nothing), setting)
    assert vacuous.same_counts and not vacuous.proven and "proves nothing" in vacuous.problems[0]
    # What both servers decode without a draft is for information: other kernels may break a tie otherwise.
    elsewhere = compare(plain, speculative, BundledRun([[1, 5]], counts), setting)
    assert elsewhere.proven and elsewhere.against_bundled[0].index == 1


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with a best and a last draft, exported for vLLM."""
    for seed, name in enumerate(("best", "draft")):
        save_draft(tmp_path / name, new_draft(Eagle3Config(), tiny_target(num_hidden_layers=8), seed), target=IDENTITY)
    export_draft(tmp_path, ["vllm"], dtype=torch.bfloat16)
    return tmp_path


def test_the_run_around_an_export_is_found(run: Path, tmp_path: Path) -> None:
    export = run / "export" / "vllm"
    assert find_run(export) == run.resolve()
    assert check_export(export, run).dtype == torch.bfloat16
    lost = tmp_path / "elsewhere" / "here"
    lost.mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"not known which run[\s\S]*--run"):
        find_run(lost / "vllm")
    with pytest.raises(CheckpointError, match="no draft is saved here"):
        find_run(export, lost)


def test_an_export_of_another_draft_is_no_proof(run: Path) -> None:
    export = run / "export" / "vllm"
    with pytest.raises(ExportError, match=r"is not what .*draft exports to now[\s\S]*--run"):
        check_export(export, run / "draft")
    with pytest.raises(ExportError, match="holds no export"):
        check_export(run, run)


def test_targets_of_a_server(tmp_path: Path) -> None:
    assert server_target(TargetConfig(model=str(tmp_path))) == tmp_path.resolve()
    assert server_target(TargetConfig(model="some/name")) == "some/name"
    with pytest.raises(ExportError, match=r"GGUF[\s\S]*--target"):
        server_target(TargetConfig(model="model.gguf"))


def test_a_server_that_dies_is_told_with_its_last_words(tmp_path: Path) -> None:
    """An interpreter without vLLM stands in: what it says is what is shown."""
    here = ServerEnvironment(Path(sys.executable), {})
    died = run_vllm(here, {}, [[1]], 4, {server.PLAIN: None})[server.PLAIN]
    assert isinstance(died, ServerError)
    assert "vLLM died in run 'plain'" in str(died) and "No module named 'vllm'" in str(died)


def test_a_server_that_hangs_is_stopped_with_its_children(tmp_path: Path) -> None:
    hanging = tmp_path / "python"
    hanging.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {tmp_path}/child\nwait\n")
    hanging.chmod(0o755)
    (stopped,) = run_vllm(ServerEnvironment(hanging, {}), {}, [[1]], 4, {"draft": None}, timeout_s=1).values()
    assert isinstance(stopped, ServerError) and "was stopped after 1 s in run 'draft'" in str(stopped)
    child = int((tmp_path / "child").read_text())
    for _ in range(50):  # whoever reaps orphans may take a moment
        if not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the child runs on")


def test_an_environment_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(environment, "_call", refuse)
    folder = vllm_folder()
    assert folder.is_relative_to(tmp_path)
    (folder / "half").mkdir(parents=True)
    with pytest.raises(UserError, match="no index"):
        vllm_environment()
    assert not folder.exists()


def refuse(command: list[str]) -> str:
    raise UserError("no index")


def test_the_command_refuses_before_anything_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", str(tmp_path / "none")]) == 2
    assert "--run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["prove", str(tmp_path), "--count", "0"])
