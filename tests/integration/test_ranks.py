"""Several ranks in processes of their own: a target in shards, ranks that die or disagree."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from drafttrain.drafters.saving import load_draft
from drafttrain.features.reader import StoreReader
from drafttrain.features.server import FeatureServer
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import load_target
from tests.launching import ROOT, finish, start_ranks
from tests.tiny_world import environment, make_world, metrics, recipe, train

TRAIN = str(ROOT / "drafttrain/train.py")
QUIET: dict[str, Any] = {"every": None, "prompts": 0}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target and conversations."""
    return make_world(tmp_path_factory.mktemp("world"))


def start(world: Path, path: Path, **options: Any) -> list[Any]:
    return start_ranks([TRAIN, str(path)], 2, environment(world), options.pop("cwd", world), **options)


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_the_70b_recipe_runs_in_small_with_its_target_in_shards(world: Path) -> None:
    runs = {}
    for name, placement in (("sharded", "zero3"), ("whole", "whole")):
        runs[name] = world / f"llama70b-{name}"
        changes = {
            "target.model": str(world / "target"),
            "target.dtype": "float32",
            "target.placement": placement,
            "data.prompts": [{"source": str(world / "conversations.jsonl")}],
            "data.answers": {"source": "given"},
            "data.held_out": 4,
            "drafter.draft_vocab_size": 128,
            "training.epochs": None,
            "training.max_steps": 4,
            "training.log_every": 1,
            "training.precision": "fp32",
            "evaluation": {"every": 2, "prompts": 3, "k": 3, "max_new_tokens": 8},
            "output_dir": str(runs[name]),
        }
        overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
        said = train(world, "recipes/eagle_llama70b.yaml", *overrides, ranks=2, launch="zero2")
        assert "ZeRO-2" in said
    sharded, whole = metrics(runs["sharded"]), metrics(runs["whole"])
    assert len(sharded) == 4
    for mine, other in zip(sharded, whole, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-4)
    measured = [(r["step"], r["tau"]) for r in metrics(runs["sharded"], "eval")]
    assert measured == [(r["step"], r["tau"]) for r in metrics(runs["whole"], "eval")] and len(measured) == 2
    drafter, _ = load_draft(runs["sharded"] / "draft")
    with safe_open(runs["sharded"] / "checkpoints/step-00000004/model.safetensors", "pt") as file:
        assert set(file.keys()) == set(drafter.state_dict())


def test_a_killed_rank_is_named_by_one_that_lives(world: Path) -> None:
    run = world / "killed-rank"
    path = recipe(world, run, training={"max_steps": 100_000, "save_every": 2}, evaluation=QUIET)
    processes = start(world, path)
    log = run / "metrics.jsonl"
    deadline = time.monotonic() + 250
    while not (log.exists() and len(log.read_text().splitlines()) >= 3):
        assert all(process.poll() is None for process in processes) and time.monotonic() < deadline
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGKILL)
    (status, said), (killed, _) = finish(processes)
    assert killed == -signal.SIGKILL and status not in (0, -signal.SIGKILL)
    said = one_line(said)
    assert said.count("died at step") == 1 and f"process {processes[1].pid}) died at step" in said
    assert "Traceback" not in said
    life = json.loads((run / "heartbeat/rank-00001.json").read_text())
    assert life["pid"] == processes[1].pid and life["failed"] is None and not life["ended"]


def test_what_one_rank_alone_cannot_start_with_is_shown_while_the_others_wait(world: Path) -> None:
    """They wait for it in the rendezvous, and only a launcher can end them."""
    path = recipe(world, world / "alone", evaluation=QUIET)
    (world / "elsewhere").mkdir()
    for ways in (
        {"own_cwd": {1: world / "elsewhere"}},  # which has no such file
        {"own": {1: ["--resume", "nowhere"]}},
    ):
        processes = start_ranks([TRAIN, path.name], 2, environment(world), world, **ways)  # type: ignore[arg-type]
        try:
            said, _ = processes[1].communicate(timeout=200)
            assert processes[1].returncode == 2 and processes[0].poll() is None
            assert said.count("error: ") == 1 and "no such" in said and "Traceback" not in said
        finally:
            processes[0].kill()
            assert "error: " not in processes[0].communicate()[0]


def test_ranks_that_disagree_on_the_recipe_stop_with_one_error(world: Path) -> None:
    run = world / "disagree"
    path = recipe(world, run, evaluation=QUIET)
    ends = finish(start(world, path, own={1: ["training.lr=0.5"]}))
    assert [status for status, _ in ends] == [2, 2]
    said = one_line("".join(output for _, output in ends))
    assert said.count("the ranks disagree on the recipe") == 1
    assert "training.lr is 0.003 on rank 0 and 0.5 on rank 1" in said and "Traceback" not in said
    assert not (run / "checkpoints").exists()


def test_ranks_that_read_other_data_stop_with_one_error(world: Path) -> None:
    run = world / "other-data"
    here, there = world / "host-0", world / "host-1"
    for folder in (here, there):
        folder.mkdir()
        shutil.copy(world / "conversations.jsonl", folder)
    lines = (world / "conversations.jsonl").read_text().splitlines(keepends=True)
    (there / "conversations.jsonl").write_text("".join(lines[:-1]))
    path = recipe(world, run, data={"prompts": [{"source": "conversations.jsonl"}]}, evaluation=QUIET)
    ends = finish(start(world, path, cwd=here, own_cwd={1: there}))
    assert [status for status, _ in ends] == [2, 2]
    said = one_line("".join(output for _, output in ends))
    assert said.count("the ranks disagree on the data") == 1 and "samples is" in said and "Traceback" not in said
    assert not (run / "checkpoints").exists()


def test_a_token_that_one_rank_lacks_stops_all_before_data(world: Path) -> None:
    here, there = world / "token-0", world / "token-1"
    for folder, token in ((here, "secret"), (there, "guessed")):
        folder.mkdir()
        (folder / "token").write_text(token)
    server = FeatureServer(load_target(TargetConfig(model=str(world / "target"), dtype="float32")), "secret")
    thread = threading.Thread(target=server.serve)
    thread.start()
    features = {"source": "stream", "urls": [server.url], "token_file": "token"}
    path = recipe(world, world / "token", features=features, evaluation=QUIET)
    try:
        ends = finish(start(world, path, cwd=here, own_cwd={1: there}))
    finally:
        server.stop()
        thread.join()
    assert [status for status, _ in ends] == [2, 2]
    said = one_line("".join(output for _, output in ends))
    assert said.count(f"rank 1: {server.url}: wrong or missing token") == said.count("error: ") == 1
    assert "loading the target" not in said and not (world / "token/data").exists()


def test_a_mistake_is_one_error_and_not_one_a_rank(world: Path) -> None:
    path = recipe(world, world / "mistake", target={"model": str(world / "nowhere")}, evaluation=QUIET)
    ends = finish(start(world, path))
    assert [status for status, _ in ends] == [2, 2]
    said = one_line("".join(output for _, output in ends))
    assert said.count("no such target folder") == 1 and "Traceback" not in said


def test_two_ranks_write_one_store_and_go_on_after_a_kill(world: Path) -> None:
    """Launched as a user would; a rank dies while both write, and the next launch adds what is missing alone."""
    store = world / "shared-store"
    features = {"source": "offline", "dtype": "float32", "path": str(store), "batch_tokens": 2}
    few = {"max_steps": 3, "save_every": None}
    path = recipe(world, world / "two-writers", features=features, training=few, evaluation=QUIET)
    processes = start(world, path)
    deadline = time.monotonic() + 250
    while not (store / "writing.1.lock").exists():
        assert all(process.poll() is None for process in processes) and time.monotonic() < deadline
        time.sleep(0.001)
    processes[1].send_signal(signal.SIGKILL)
    (status, said), _ = finish(processes)
    assert status not in (0, -signal.SIGKILL) and f"process {processes[1].pid}) died" in one_line(said)
    # Rank 0 had its own part to write, and did.
    left = {folder.name: folder.stat().st_mtime_ns for folder in (store / "shards").iterdir()}
    assert any(int(name) % 2 == 0 for name in left)
    train(world, str(path), ranks=2)
    numbers = {int(folder.name) for folder in (store / "shards").iterdir()}
    assert {number % 2 for number in numbers} == {0, 1}
    assert all((store / "shards" / name).stat().st_mtime_ns == written for name, written in left.items())
    reader = StoreReader(store)
    assert reader.complete and len(reader) == 20
    assert (store / "recipe.yaml").exists() and (store / "provenance.json").exists()
    # What two ranks wrote serves one, and gives the curve of computed features.
    alone = recipe(
        world, world / "one-reader", features=features, training={**few, "accumulation": 4}, evaluation=QUIET
    )
    online = recipe(world, world / "no-store", training={**few, "accumulation": 4}, evaluation=QUIET)
    for other in (alone, online):
        train(world, str(other))
    for name in ("one-reader", "no-store"):
        for ours, theirs in zip(metrics(world / "two-writers"), metrics(world / name), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4), name


def test_a_mistake_in_the_recipe_is_said_once(world: Path) -> None:
    path = recipe(world, world / "typo", training={"shedule": "wsd"}, evaluation=QUIET)
    ends = finish(start(world, path))
    assert [status for status, _ in ends] == [2, 2]
    assert one_line("".join(output for _, output in ends)).count("did you mean 'schedule'") == 1
