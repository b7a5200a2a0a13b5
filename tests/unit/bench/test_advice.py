from __future__ import annotations

import argparse
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from drafttrain.bench.advice import Option, advise, vllm_config
from drafttrain.bench.report.advice import in_words
from drafttrain.bench.result import EvalResult, Memory, Setting
from drafttrain.cli import advise as command
from drafttrain.drafters.eagle.config import Eagle1Config
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.saving import save_draft
from drafttrain.errors import DataError, UserError
from drafttrain.files import sha256_file, write_json
from tests.draft_support import new_draft
from tests.support import tiny_target
from tests.unit.bench.conftest import simulate

EAGLE = "eagle3-smollm2"


def slower_at_8(result: EvalResult, factor: float) -> EvalResult:
    """The same, had drafted rounds of more than two rows taken `factor` times as long."""
    entries = []
    for entry in result.drafts:
        if entry.draft.startswith(EAGLE):
            timings = [replace(t, verify_s=t.verify_s * (factor if t.rows > 2 else 1)) for t in entry.timings]
            entry = replace(entry, timings=timings)
            if entry.setting.batch == 8 and entry.speed is not None and entry.speed.speedup is not None:
                slow = replace(entry.speed, speedup=entry.speed.speedup / factor, speedup_ci=(0.5, 0.7))
                entry = replace(entry, speed=slow)
        entries.append(entry)
    return replace(result, drafts=entries)


def test_the_best_of_each_batch_size_is_the_best_that_was_measured(wide_evaluation: EvalResult) -> None:
    advice = advise(wide_evaluation)
    assert [option.batch for option in advice.best] == [1, 8]
    for option in advice.best:
        measured = [
            e.speed.speedup
            for e in wide_evaluation.drafts
            if e.base == EAGLE and e.setting.batch == option.batch and e.speed is not None and e.speed.speedup
        ]
        # K=1 and K=3 may be predicted to be better, by more than the model is off.
        assert option.speedup == max(measured) or option.speedup > max(measured) * (1 + advice.error)
        assert (option.basis == "measured") == (option.speedup in measured)


def test_shorter_chains_accept_what_longer_ones_do(wide_evaluation: EvalResult) -> None:
    """tau of K=4 is the pooled one; K=3 comes from K=4's rounds, K=1 from K=2's, and they grow with K."""
    found = {k: (tau, basis) for k, tau, basis in advise(wide_evaluation).acceptance}
    chains = [e for e in wide_evaluation.drafts if e.draft == EAGLE and e.setting.k == 4]
    pooled = sum(e.acceptance.emitted for e in chains) / sum(e.acceptance.rounds for e in chains)
    assert found[4] == (pytest.approx(pooled), "measured")
    assert [found[k][1] for k in (1, 2, 3)] == ["interpolated", "measured", "interpolated"]
    taus = [found[k][0] for k in (1, 2, 3, 4)]
    assert taus == sorted(taus) and taus[0] > 1.3


def test_drafting_goes_off_where_it_loses(wide_evaluation: EvalResult) -> None:
    advice = advise(slower_at_8(wide_evaluation, 3.0))
    (one, eight) = advice.best
    assert one.pays and not eight.pays
    assert advice.off_from is not None and 2 <= advice.off_from[0] <= 8
    first, last = advice.chains[0], advice.chains[-1]
    assert first[0] == 1 and first[2] > 0 and last[1] == 8 and last[2] == 0
    served = vllm_config(advice, "eagle3", "m")
    assert served is not None and served["num_speculative_tokens"] == max(k for _, _, k in advice.chains)
    ranges = served["num_speculative_tokens_per_batch_size"]
    # vLLM wants ranges that start at 1, in order, without a gap or an overlap.
    assert ranges[0][0] == 1 and ranges[-1][1] == 8
    assert all(after[0] == before[1] + 1 for before, after in pairwise(ranges))
    said = "\n".join(in_words(advice))
    assert "to 8: do not draft" in said and "batch 8: do not draft; the best is" in said


@pytest.mark.parametrize(("speedup", "pays"), [(0.9, False), (1.004, False), (1.006, True)])
def test_what_is_printed_as_no_gain_is_none(speedup: float, pays: bool) -> None:
    option = Option(1, EAGLE, "K=1", 1, speedup, None, 1.5, "interpolated")
    assert option.pays is pays is (f"{speedup:.2f}" > "1.00")


def test_a_draft_that_never_pays_is_advised_against(wide_evaluation: EvalResult) -> None:
    hopeless = slower_at_8(wide_evaluation, 3.0)
    hopeless = replace(hopeless, drafts=[e for e in hopeless.drafts if e.setting.batch == 8])
    advice = advise(hopeless)
    assert [(option.batch, option.pays) for option in advice.best] == [(8, False)]
    assert advice.break_even == [] and advice.chains[-1][1:] == (8, 0)


def test_what_lies_beyond_the_measurement_says_so(wide_evaluation: EvalResult) -> None:
    assert {p.setting.batch for p in advise(wide_evaluation).predictions} == {1, 8}
    beyond = advise(replace(wide_evaluation, drafts=[e for e in wide_evaluation.drafts if e.setting.batch == 1]))
    assert beyond.chains == [(1, 1, beyond.chains[0][2])]
    if beyond.off_from is not None:
        assert beyond.off_from[1] == "extrapolated"
    assert any("Only batch 1" in note for note in beyond.notes)
    served = vllm_config(beyond, "eagle3", "m")
    assert served is not None and "num_speculative_tokens_per_batch_size" not in served


def test_one_k_is_no_ground_for_another() -> None:
    result = simulate(settings=[Setting(4, 0.0, 1), Setting(4, 0.0, 8)])
    advice = advise(result)
    assert {option.k for option in advice.best} == {4}
    assert any("one K was measured" in note for note in advice.notes)
    assert any("No tree was measured" in note for note in advice.notes)


def test_a_cpus_times_are_said_to_be_a_cpus(wide_evaluation: EvalResult) -> None:
    said = "\n".join(in_words(advise(wide_evaluation)))
    assert "those of a CPU" in said
    on_gpu = advise(replace(wide_evaluation, device="cuda"))
    assert not any("CPU" in note for note in on_gpu.notes)


def test_a_guess_is_corrected_by_what_the_model_misses(wide_evaluation: EvalResult) -> None:
    """Every drafted round took twice what its median says: no K that was not measured looks better for that."""
    entries = []
    for entry in wide_evaluation.drafts:
        if entry.draft == EAGLE and entry.speed is not None and entry.speed.speedup is not None:
            entry = replace(entry, speed=replace(entry.speed, speedup=entry.speed.speedup / 2, speedup_ci=None))
        entries.append(entry)
    halved = replace(wide_evaluation, drafts=[e for e in entries if not e.variant])
    advice = advise(halved)
    assert [(option.batch, option.pays) for option in advice.best] == [(1, False), (8, False)]
    assert any("measure again" in note for note in advice.notes)
    assert not any("measure again" in note for note in advise(wide_evaluation).notes)


def test_short_outputs_pay_once_the_drafts_prefill_is_earned(wide_evaluation: EvalResult) -> None:
    """The prefill of 40 prompts costs 0.2 s more with the draft: 5 ms each."""
    (one, eight) = advise(wide_evaluation).break_even
    assert one.prefill_s == pytest.approx(0.005)
    # Saved a token at batch 1: (1 - 1/speed-up) of a plain round of 34.4 ms.
    option = advise(wide_evaluation).best[0]
    assert one.tokens == pytest.approx(1 + 0.005 / (0.0344 * (1 - 1 / option.speedup)), rel=0.05)
    assert eight.tokens > one.tokens


def test_memory_is_shared_out_by_what_the_engine_held(wide_evaluation: EvalResult) -> None:
    fit = advise(wide_evaluation, budget=10**9, context=1000).fit
    assert fit is not None
    assert (fit.target, fit.draft) == (270_000_000, 39_000_000)
    assert (fit.target_per_token, fit.draft_per_token) == (46_000, 1_500)
    assert fit.rows_plain == (10**9 - 270_000_000) // 46_000_000
    assert fit.rows_drafting == (10**9 - 309_000_000) // 47_500_000
    none = advise(wide_evaluation, budget=1000).fit
    assert none is not None and (none.rows_plain, none.rows_drafting) == (0, 0) and none.context == 200
    assert Memory(0, 600, 2, 300).per_token == 1.0


def test_a_faster_reference_is_named(wide_evaluation: EvalResult) -> None:
    rivals = advise(slower_at_8(wide_evaluation, 3.0)).rivals
    assert [(rival.batch, rival.draft) for rival in rivals] == [(8, "ngram")]


def test_references_alone_give_no_advice(wide_evaluation: EvalResult) -> None:
    with pytest.raises(DataError, match=r"tables\.yaml"):
        advise(replace(wide_evaluation, run=""))


def run_command(*words: str) -> int:
    parser = argparse.ArgumentParser()
    command.register(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["advise", *words])
    return int(arguments.run(arguments))


def test_the_command_reads_the_newest_result(
    wide_evaluation: EvalResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, date in (("old", "2026-01-01"), ("new", "2026-02-01")):
        (tmp_path / "eval" / name).mkdir(parents=True)
        value = {**wide_evaluation.to_json(), "date": date}
        (tmp_path / "eval" / name / "result.json").write_text(json.dumps(value), "utf-8")
    assert run_command(str(tmp_path), "--json", "--memory", "1.5GiB") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["date"] == "2026-02-01" and said["fit"]["budget"] == 3 * 2**29
    assert said["vllm"]["method"] == "eagle3" and said["vllm"]["model"].endswith("export/vllm")
    assert run_command(str(tmp_path), "--suite", "old") == 0
    words = capsys.readouterr().out
    assert "2026-01-01" in words and "--speculative-config" in words


def test_medusa_heads_that_read_the_targets_are_no_reason_to_refuse(
    wide_evaluation: EvalResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export brings vLLM a copy of that head. What vLLM does refuse is said, and nothing advised for it."""
    for config, refusal in ((MedusaConfig(num_heads=2, head="target"), None), (Eagle1Config(fc_bias=True), "fc_bias")):
        result = {**wide_evaluation.to_json(), "family": config.family}
        save_draft(tmp_path / "draft", new_draft(config, tiny_target()), target={}, replace=True)
        result["weights"] = "0" * 64 if refusal else sha256_file(tmp_path / "draft" / "model.safetensors")
        write_json(tmp_path / "eval" / "tables" / "result.json", result)
        assert run_command(str(tmp_path), "--json") == 0
        said = json.loads(capsys.readouterr().out)
        assert ("another draft" in said["notes"][0]) == bool(refusal)
        assert run_command(str(tmp_path)) == 0
        words = capsys.readouterr().out
        if refusal is None:
            assert said["vllm_refuses"] is None and said["vllm"]["method"] == "medusa"
            assert '"method": "medusa"' in words and "does not take this draft" not in words
        else:
            assert refusal in said["vllm_refuses"] and said["vllm"] is None
            assert "does not take this draft" in words and "--speculative-config" not in words


def test_a_run_without_an_eval_is_told_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no eval[^$]*drafttrain eval"):
        run_command(str(tmp_path))
    with pytest.raises(UserError, match="no run's folder"):
        run_command(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="no result of 'core'"):
        run_command(str(tmp_path), "--suite", "core")
    with pytest.raises(UserError, match="--memory 16G"):
        run_command(str(tmp_path), "--context", "100")


@pytest.mark.parametrize("word", ["lots", "0G", "-1G", "16X"])
def test_a_budget_that_is_no_size_is_refused(tmp_path: Path, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run_command(str(tmp_path), f"--memory={word}")
    assert "is no size" in capsys.readouterr().err
