"""The eval command on a tiny target in a folder, a random EAGLE-3 draft, the references and the baseline."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.bench.evaluate import evaluate as run_evaluation
from drafttrain.bench.leaderboard import KEYS
from drafttrain.bench.metrics import acceptance
from drafttrain.bench.suite import load_suite
from drafttrain.bench.tables import TITLES
from drafttrain.cli.main import build_parser, main
from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.saving import save_draft
from drafttrain.engine.calibration_file import TreeFile, write_calibration
from drafttrain.engine.records import RoundRecord
from drafttrain.errors import CheckpointError, DataError, EngineError, RecipeError, UserError
from drafttrain.files import sha256_file
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import load_target
from tests.chats import CHATML, chat_tokenizer
from tests.support import tiny_hf

K = 3
PROMPTS = [
    {"id": "w1", "category": "writing", "turns": ["Write a line about the sea."]},
    {"id": "c1", "category": "coding", "turns": ["def add(a, b):", "Now in one line 😀"]},
    {"id": "m1", "category": "multilingual", "turns": ["你好，世界"]},
    {"id": "m2", "category": "multilingual", "turns": ["مرحبا"]},
    {"id": "w2", "category": "writing", "turns": ["x"]},
]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with target, prompts, suite and a run as training leaves it."""
    folder = tmp_path_factory.mktemp("eval")
    tokenizer = chat_tokenizer(CHATML)
    hf = tiny_hf(vocab_size=len(tokenizer), max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id, seed=4)
    hf.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in PROMPTS), encoding="utf-8"
    )
    (folder / "suite.yaml").write_text(
        f"name: tiny\nprompts: {folder}/prompts.jsonl\nk: [{K}]\ntemperatures: [0.0, 1.0]\nbatch: [1, 2]\n"
        "max_new_tokens: 24\nchunk: 2\nwarmup: 1\nbootstrap: 100\n",
        encoding="utf-8",
    )
    run = folder / "runs" / "tiny-eagle3"
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(
        f"name: tiny-eagle3\ntarget: {{model: {folder}/target, dtype: float32}}\n"
        "data: {prompts: [{source: self, count: 4}]}\n"
        "drafter: {family: eagle3, taps: [0, 2, 3], depth: 3}\n"
        "loss: {terms: [{name: soft_ce}]}\ntraining: {max_steps: 1}\n",
        encoding="utf-8",
    )
    target = load_target(TargetConfig(model=str(folder / "target"), dtype="float32"))
    torch.manual_seed(0)
    drafter = build_drafter(Eagle3Config(taps=(0, 2, 3), depth=3), target.config)
    init_from_target(drafter, target)
    save_draft(run / "best", drafter, target=target.identity.to_dict())
    return folder


def evaluate(*words: str) -> int:
    """`drafttrain eval` with these arguments, errors raised."""
    arguments = build_parser().parse_args(["eval", *words])
    return int(arguments.run(arguments) or 0)


@pytest.fixture(scope="module")
def results(home: Path) -> dict[str, Any]:
    """One whole evaluation."""
    suite, run = str(home / "suite.yaml"), str(home / "runs" / "tiny-eagle3")
    assert evaluate(run, "--suite", suite, "--leaderboard-dir", str(home / "board")) == 0
    result: dict[str, Any] = json.loads((home / "runs/tiny-eagle3/eval/tiny/result.json").read_text("utf-8"))
    return result


def entries(results: dict[str, Any], draft: str, temperature: float | None = None) -> list[dict[str, Any]]:
    return [e for e in results["drafts"] if e["draft"] == draft and temperature in (None, e["setting"]["temperature"])]


def test_every_setting_has_every_draft(results: dict[str, Any]) -> None:
    found = {(e["draft"], e["setting"]["temperature"], e["setting"]["batch"]) for e in results["drafts"]}
    greedy = {"none", "tiny-eagle3", "ngram", "oracle"}
    assert found == {(d, 0.0, b) for d in greedy for b in (1, 2)} | {
        (d, 1.0, b) for d in greedy - {"oracle"} for b in (1, 2)
    }
    assert all(e["requests"] == 5 and e["answers"] == 6 for e in results["drafts"])


def test_plain_decoding_has_tau_exactly_one(results: dict[str, Any]) -> None:
    for entry in entries(results, "none"):
        assert entry["acceptance"]["tau"] == 1.0
        assert entry["acceptance"]["acceptance_rate"] is None
        assert entry["acceptance"]["emitted"] == entry["tokens"] - entry["answers"]


def test_the_rows_shares_add_up_to_the_engines_clock(results: dict[str, Any]) -> None:
    for entry in results["drafts"]:
        split = entry["split"]
        assert split["draft_s"] + split["verify_s"] + split["host_s"] == pytest.approx(entry["decode_s"], rel=1e-6)


def test_no_draft_changes_greedy_output(results: dict[str, Any]) -> None:
    for draft in ("tiny-eagle3", "ngram", "oracle"):
        for entry in entries(results, draft, 0.0):
            assert (entry["exact"]["rate"], entry["exact"]["divergences"]) == (1.0, [])
            assert entry["tokens"] == entries(results, "none", 0.0)[0]["tokens"]


def test_the_oracle_is_always_accepted(results: dict[str, Any], home: Path) -> None:
    """Everything proposed is accepted, so an answer of n tokens takes ceil((n - 1) / (K + 1)) rounds."""
    for entry in entries(results, "oracle"):
        assert entry["acceptance"]["acceptance_rate"] == 1.0
        assert set(entry["acceptance"]["alpha"]) == {1.0}
    emitted: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for line in (home / "runs/tiny-eagle3/eval/tiny/records.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        if row["draft"] == "oracle":
            emitted[row["request"], row["turn"], row["max_batch"]].append(row["emitted"])
    assert len(emitted) == 12
    assert all(len(rounds) == math.ceil(sum(rounds) / (K + 1)) for rounds in emitted.values())


def test_every_metric_can_be_derived_from_the_written_records(results: dict[str, Any], home: Path) -> None:
    rounds: dict[tuple[Any, ...], list[RoundRecord]] = defaultdict(list)
    for line in (home / "runs/tiny-eagle3/eval/tiny/records.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        key = (row.pop("draft"), row.pop("k"), row.pop("temperature"), row.pop("max_batch"))
        rounds[key].append(RoundRecord(**row))
    for entry in results["drafts"]:
        setting = entry["setting"]
        again = acceptance(rounds[entry["draft"], setting["k"], setting["temperature"], setting["batch"]], samples=100)
        assert again.tau == entry["acceptance"]["tau"]
        assert again.alpha == entry["acceptance"]["alpha"]
        assert again.tau_ci == tuple(entry["acceptance"]["tau_ci"])


def test_impossible_speedups_are_never_results(results: dict[str, Any], home: Path) -> None:
    report = (home / "runs/tiny-eagle3/eval/tiny/report.html").read_text("utf-8")
    for entry in results["drafts"]:
        speed = entry["speed"]
        if speed is None:
            continue
        assert (speed["flag"] is None) == (speed["speedup"] is not None)
        if speed["speedup"] is not None:
            assert speed["speedup"] <= entry["acceptance"]["tau"]
        else:
            assert any(note.startswith(f"{entry['draft']} at") for note in results["notes"])
            assert "no result" in report


def test_leaderboard_rows_have_exactly_the_agreed_keys(results: dict[str, Any], home: Path) -> None:
    rows = json.loads((home / "board" / "tiny-tiny-eagle3.json").read_text("utf-8"))
    agreed = (
        "target, family, draft, recipe, k, temperature, batch, prompts, tau, tau_ci, alpha, acceptance_rate, "
        "speedup, speedup_ci, exact_match, hardware, versions, commit, date"
    )
    assert ", ".join(KEYS) == agreed
    assert len(rows) == 10 and all(tuple(row) == KEYS for row in rows)
    eagle = next(row for row in rows if row["draft"] == "tiny-eagle3")
    assert (eagle["family"], eagle["recipe"], eagle["prompts"]) == ("eagle3", "tiny-eagle3", "tiny (5)")
    assert "| oracle |" in (home / "board" / "README.md").read_text("utf-8")
    assert evaluate("--leaderboard", "--leaderboard-dir", str(home / "board")) == 0


def test_the_report_needs_no_network_and_shows_who_wrote_what(results: dict[str, Any], home: Path) -> None:
    report = (home / "runs/tiny-eagle3/eval/tiny/report.html").read_text("utf-8")
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?:|fetch\(""", report)
    charts = sum(len(results["tables"][name]) for name in TITLES)
    assert report.count("<svg") == 4 * 4 + charts and charts >= 4
    assert "Now in one line 😀" in report and "مرحبا" in report
    assert 'title="depth 1"' in report


def test_tables_and_cost_models_stand_in_the_result(results: dict[str, Any]) -> None:
    found = results["tables"]
    assert [grid["columns"] for grid in found["batch"]] == [["1", "2"], ["1", "2"]]
    assert [row["draft"] for row in found["draft"][0]["rows"]] == ["tiny-eagle3", "ngram", "oracle"]
    assert "k=[" in found["missing"]["variant"]
    assert [model["temperature"] for model in results["cost_models"]] == [0.0, 1.0]
    assert all(0 < p["host_share"] < 1 for model in results["cost_models"] for p in model["predictions"])


def test_memory_added_is_the_drafts_weights_and_caches(results: dict[str, Any], home: Path) -> None:
    """Weights as they are stored, in fp32, vocabulary maps apart; caches grow with the batch."""
    stored = load_file(home / "runs/tiny-eagle3/best/model.safetensors").values()
    weights = sum(4 * tensor.numel() for tensor in stored if tensor.is_floating_point())
    one, two = (e["memory"] for e in entries(results, "tiny-eagle3", 0.0))
    assert one["weights"] == two["weights"] == weights
    assert two["state"] == 2 * one["state"] > 0
    assert all(e["memory"]["weights"] == 0 for e in entries(results, "ngram"))


def test_the_result_says_which_weights_it_is_of(results: dict[str, Any], home: Path) -> None:
    assert results["weights"] == sha256_file(home / "runs/tiny-eagle3/best/model.safetensors")


def test_an_interrupted_eval_goes_on(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    suite, overrides = str(home / "suite.yaml"), ["temperatures=[0.0]", "limit=2", "drafts=[run]"]
    run, out = str(home / "runs/tiny-eagle3"), tmp_path / "out"

    def interrupt(what: str, done: int, total: int) -> None:
        if "batch 2" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_evaluation(run, load_suite(suite, overrides), progress=interrupt, folder=out)
    words = (run, "--suite", suite, *overrides, "--out", str(out), "--no-leaderboard")
    assert [path.name for path in (out / "unfinished").glob("k3*")] == ["k3-t0-batch1.json"]
    assert evaluate(*words) == 0
    assert "going on with 1 setting(s)" in capsys.readouterr().out
    result = json.loads((out / "result.json").read_text("utf-8"))
    assert [e["setting"]["batch"] for e in result["drafts"]] == [1, 1, 2, 2]
    assert any("before an interruption" in note for note in result["notes"])
    assert {path.name for path in out.iterdir()} == {
        "result.json",
        "report.html",
        "records.jsonl",
        "leaderboard.json",
        ".lock",
    }


def test_another_tree_file_is_another_eval(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, tree, out = str(home / "runs/tiny-eagle3"), tmp_path / "tree.json", tmp_path / "out"
    write_calibration(tree, TreeFile("sequoia", (-1, 0, 0), False, {}))
    overrides = ["temperatures=[0.0]", "limit=1", "drafts=[run]", f"trees=[{{file: {tree}}}]"]

    def interrupt(what: str, done: int, total: int) -> None:
        if "batch 2" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_evaluation(run, load_suite(home / "suite.yaml", overrides), progress=interrupt, folder=out)
    write_calibration(tree, TreeFile("sequoia", (-1, -1, 0), False, {}))
    assert evaluate(run, "--suite", str(home / "suite.yaml"), *overrides, "--out", str(out), "--no-leaderboard") == 0
    assert "is dropped: other files" in capsys.readouterr().out


def test_what_another_eval_left_is_dropped_and_said(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left = tmp_path / "unfinished"
    left.mkdir(parents=True)
    (left / "key.json").write_text("{}", "utf-8")
    (left / "k3-t0-batch1.json").write_text("{}", "utf-8")
    overrides = ("temperatures=[0.0]", "batch=[1]", "limit=1", "drafts=[ngram]")
    words = (str(home / "runs/tiny-eagle3"), *overrides, "--out", str(tmp_path), "--no-leaderboard")
    assert evaluate(*words, "--suite", str(home / "suite.yaml")) == 0
    assert "is dropped: other suite, prompts" in capsys.readouterr().out


def test_a_draft_alone_at_one_setting(home: Path, tmp_path: Path) -> None:
    """Overrides apply wherever they stand; the recipe's file serves where no trained draft is asked for."""
    recipe, suite = str(home / "runs/tiny-eagle3/recipe.yaml"), str(home / "suite.yaml")
    words = (recipe, "drafts=[ngram]", "--out", str(tmp_path / "out"), "--no-leaderboard", "--suite", suite)
    assert evaluate(*words, "limit=2", "temperatures=[0.0]", "batch=[1]", "repeats=2", "target.dtype=bfloat16") == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text("utf-8"))
    assert [entry["draft"] for entry in result["drafts"]] == ["none", "ngram"]
    assert result["hardware"].endswith("bfloat16") and result["prompts"] == 2
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_a_part_of_a_suite_is_no_row_of_it_unless_asked_for(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, board = tmp_path / "out", tmp_path / "board"
    words = (str(home / "runs/tiny-eagle3"), "--out", str(out), "--leaderboard-dir", str(board))
    words += ("--suite", str(home / "suite.yaml"), "temperatures=[0.0]", "batch=[1]", "drafts=[ngram]")
    assert evaluate(*words, "limit=1", "max_new_tokens=4") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "limit=1, max_new_tokens=4 is not the suite's; --leaderboard enters it" in said
    assert not board.exists()
    rows = json.loads((out / "leaderboard.json").read_text("utf-8"))
    assert [row["draft"] for row in rows] == ["ngram"] and tuple(rows[0]) == KEYS
    assert evaluate(*words, "limit=1", "max_new_tokens=4", "--leaderboard") == 0
    assert json.loads((board / "tiny-references.json").read_text("utf-8"))[0]["prompts"] == "tiny (1)"


def test_a_later_turn_that_does_not_fit_is_left_out_and_said(home: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "long.jsonl"
    turns = ["x", "y" * 300]
    prompts.write_text(json.dumps({"id": "long", "turns": turns}) + "\n" + json.dumps({"id": "b", "turns": ["z"]}))
    words = (str(home / "runs/tiny-eagle3"), "--out", str(tmp_path / "out"), "--no-leaderboard")
    overrides = (f"prompts={prompts}", "temperatures=[0.0]", "batch=[2]", "drafts=[ngram]")
    assert evaluate(*words, "--suite", str(home / "suite.yaml"), *overrides) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text("utf-8"))
    assert result["notes"][0].startswith("long: from turn 2 on")
    assert result["drafts"][0]["answers"] == 2


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        (["{run}"], UserError, "no --suite"),
        (["--suite", "{suite}"], UserError, "no run"),
        (["{run}", "{run}", "--suite", "{suite}"], UserError, "2 runs"),
        (["{run}", "--suite", "{suite}", "kk=3"], RecipeError, "kk"),
        (["{run}", "--suite", "{suite}", "target.dtypo=x"], RecipeError, "dtypo"),
        (["{home}/nowhere", "--suite", "{suite}"], UserError, "nowhere"),
        (["{run}", "--suite", "{suite}", "drafts=[run]", "target.model={home}/nowhere"], UserError, "nowhere"),
        (["{run}/recipe.yaml", "--suite", "{suite}"], RecipeError, "drafts of suite tiny include run[^$]*run's folder"),
        # A recipe is no run wherever "run" stands, and neither is a suite.
        (
            ["{run}/recipe.yaml", "--suite", "{suite}", "drafts=[{{router: [ngram, run]}}]"],
            RecipeError,
            "drafts of suite tiny include run",
        ),
        (["{suite}", "--suite", "{suite}"], RecipeError, "drafts of suite tiny include run"),
        (["{run}", "--suite", "{suite}", "prompts={home}/too_long.jsonl"], DataError, "too-long has .* tokens"),
    ],
)
def test_mistakes_are_one_clear_error(home: Path, words: list[str], error: type[UserError], message: str) -> None:
    (home / "too_long.jsonl").write_text(json.dumps({"id": "too-long", "turns": ["x" * 400]}) + "\n")
    names = {"home": home, "run": home / "runs/tiny-eagle3", "suite": home / "suite.yaml"}
    with pytest.raises(error, match=message):
        evaluate(*(word.format(**names) for word in words))


def test_a_setting_that_does_not_fit_is_refused_before_the_first_is_measured(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafttrain.bench.runner.available_bytes", lambda device: 12 * 2**20)
    words = (str(home / "runs/tiny-eagle3"), "--out", str(tmp_path), "--suite", str(home / "suite.yaml"), "limit=1")
    with pytest.raises(EngineError, match=r"batch 512: 4 engines need [^$]*lower the batch size"):
        evaluate(*words, "batch=[1, 512]", "temperatures=[0.0]")
    assert not list((tmp_path / "unfinished").glob("k[0-9]*"))


def test_a_draft_of_another_tokenizer_and_too_few_heads_are_refused(home: Path, tmp_path: Path) -> None:
    """Cases 15 and 37 of docs/cases.md: the target's name is the same, its vocabulary is not."""
    target = load_target(TargetConfig(model=str(home / "target"), dtype="float32"))
    heads = build_drafter(MedusaConfig(num_heads=K - 1), target.config)
    init_from_target(heads, target)
    identity = target.identity.to_dict()
    save_draft(tmp_path / "few", heads, target=identity)
    save_draft(tmp_path / "foreign", heads, target={**identity, "tokenizer_hash": "another"})
    run, suite = str(home / "runs/tiny-eagle3"), str(home / "suite.yaml")
    for name, error, message in (
        ("few", RecipeError, f"asks for {K} draft tokens, the draft has {K - 1} Medusa heads"),
        ("foreign", CheckpointError, "differs from .* in tokenizer_hash"),
    ):
        with pytest.raises(error, match=message):
            evaluate(run, f"drafts=[{{draft: {tmp_path / name}}}]", "--out", str(tmp_path / "o"), "--suite", suite)


def test_calibrated_and_untrained_drafts(home: Path, tmp_path: Path) -> None:
    """What `calibrate` writes is what a suite reads; every way of drafting gives the baseline's greedy output."""

    run, prompts = str(home / "runs" / "tiny-eagle3"), str(home / "prompts.jsonl")
    small = ("--prompts", prompts, "--count", "3", "--max-new-tokens", "12")
    skip, tree = tmp_path / "skip.json", tmp_path / "tree.json"
    assert main(["calibrate", run, "--kind", "skip", *small, "--evaluations", "20", "--out", str(skip)]) == 0
    assert (
        main(["calibrate", run, "--kind", "sequoia", *small, "--nodes", "5", "--depth", "3", "--out", str(tree)]) == 0
    )
    assert main(["calibrate", run, "--kind", "medusa-tree", *small, "--out", str(tree)]) == 2
    assert main(["calibrate", str(home / "target"), "--kind", "sequoia", *small]) == 2
    bare = ("--kind", "skip", *small, "--evaluations", "5", "--out", str(tmp_path / "bare.json"))
    assert main(["calibrate", str(home / "target"), "target.dtype=float32", *bare]) == 0
    assert main(["calibrate", str(home / "target"), "data.seed=1", *bare]) == 2
    # A recipe means the run that it describes.
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text((home / "runs" / "tiny-eagle3" / "recipe.yaml").read_text("utf-8"), "utf-8")
    words = [str(recipe), f"output_dir={run}", "--kind", "sequoia", *small, "--nodes", "3", "--depth", "2"]
    assert main(["calibrate", *words]) == 0
    assert (home / "runs" / "tiny-eagle3" / "sequoia.json").is_file()
    assert main(["calibrate", str(recipe), f"output_dir={tmp_path / 'none'}", "--kind", "sequoia", *small]) == 2
    drafts = (
        "drafts=[suffix, {router: [suffix, run]}, {early_exit: 2}, "
        "{cascade: [ngram, {early_exit: 1}, {early_exit: 3}]}, "
        f"{{skip: {skip}}}, {{use: run, tree: {{file: {tree}}}}}, {{synthetic: 0.5}}]"
    )
    words = (run, drafts, "limit=2", "max_new_tokens=8", "temperatures=[0.0]", "batch=[2]", "--no-leaderboard")
    assert evaluate(*words, "--out", str(tmp_path / "out"), "--suite", str(home / "suite.yaml")) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text("utf-8"))
    assert len(result["drafts"]) == 8
    # The draft under test is in three of them, and by itself in none.
    assert (result["run"], result["family"]) == ("tiny-eagle3", "eagle3")
    for entry in result["drafts"][1:]:
        assert entry["exact"]["rate"] == 1.0 and entry["acceptance"]["rounds"] > 0
    bad = {
        "{early_exit: 4}": r"^drafts\.0 \(early exit 4\): an early exit after 4 blocks of a target with 4",
        "{cascade: [ngram, run]}": "cannot check another draft's tokens in one pass",
        f"{{skip: {tree}}}": "does not hold sub-layers",
        "{use: run, device: cuda:77}": "no device 'cuda:77' here",
        "{use: run, device: meta}": "only a draft LM, which reads tokens, can be elsewhere",
    }
    for line, message in bad.items():
        with pytest.raises(UserError, match=message):
            evaluate(run, f"drafts=[{line}]", "--out", str(tmp_path / "o"), "--suite", str(home / "suite.yaml"))
