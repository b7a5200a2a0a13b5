"""`drafttrain train` from a recipe to a saved draft, in processes of its own: kills, signals, two ranks, bad input."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.files import exclusive, read_json
from drafttrain.training.run import LOCK
from tests.tiny_world import ROOT, command, curve, environment, make_world, metrics, recipe, train


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target, conversations, and prompts answered by the target once."""
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def unbroken(world: Path) -> Path:
    """A run from start to end."""
    run = world / "unbroken"
    train(world, str(recipe(world, run)))
    return run


def test_a_run_leaves_drafts_metrics_recipe_and_provenance(unbroken: Path) -> None:
    assert len(metrics(unbroken)) == 12
    measured = metrics(unbroken, "eval")
    assert [record["step"] for record in measured] == [6, 12]
    assert all(record["tau"] >= 1 for record in measured) and measured[0]["best"]
    from drafttrain.drafters.saving import load_draft
    from drafttrain.recipe.load import load_recipe

    for name in ("draft", "best"):
        drafter, meta = load_draft(unbroken / name)
        assert meta.family == "eagle3" and meta.provenance["step"] in (6, 12)
        assert drafter.vocab_map.size == 128
    assert load_recipe(unbroken).training.max_steps == 12
    launches = json.loads((unbroken / "provenance.json").read_text())
    assert launches[0]["target"]["weights_hash"] and launches[0]["data"]
    assert sorted(path.name for path in (unbroken / "checkpoints").iterdir()) == ["step-00000008", "step-00000012"]


def test_kill_9_and_resume_give_the_curve_of_an_unbroken_run(world: Path, unbroken: Path) -> None:
    run = world / "killed"
    path = recipe(world, run)
    process = subprocess.Popen(command(str(path)), env=environment(world), cwd=world, stdout=subprocess.DEVNULL)
    log = run / "metrics.jsonl"
    deadline = time.monotonic() + 400
    while not (log.exists() and len(log.read_text().splitlines()) >= 6):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    # What a kill may leave: a torn line, a folder that was never finished.
    with log.open("a") as file:
        file.write('{"kind": "train", "st')
    (run / "checkpoints/.step-00000099.abc.part").mkdir()
    said = train(world, str(path))
    assert "resuming after step" in said
    assert curve(run) == curve(unbroken)
    ours, theirs = load_file(run / "draft/model.safetensors"), load_file(unbroken / "draft/model.safetensors")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert len(json.loads((run / "provenance.json").read_text())) == 2


def test_sigterm_saves_and_stops(world: Path, unbroken: Path) -> None:
    run = world / "stopped"
    path = recipe(world, run, training={"save_every": None})
    process = subprocess.Popen(command(str(path)), env=environment(world), cwd=world, stdout=subprocess.PIPE, text=True)
    log = run / "metrics.jsonl"
    deadline = time.monotonic() + 400
    while not (log.exists() and len(log.read_text().splitlines()) >= 2):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=400)
    if process.returncode == 0:
        pytest.skip("the run was over before the signal came")
    assert process.returncode == 143
    assert "stopped and saved after step" in out
    assert len(list((run / "checkpoints").iterdir())) == 1
    train(world, str(path))
    assert curve(run) == curve(unbroken)


def test_offline_features_give_the_online_curve(world: Path, unbroken: Path) -> None:
    run = world / "offline"
    train(world, str(recipe(world, run, features={"source": "offline", "dtype": "float32"})))
    for ours, theirs in zip(metrics(run), metrics(unbroken), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert json.loads((run / "features/manifest.json").read_text())["complete"]
    # A second run with other taps refuses the store by name, and leaves it.
    other = recipe(
        world,
        world / "offline-2",
        features={"source": "offline", "dtype": "float32", "path": str(run / "features")},
        drafter={"family": "eagle3", "draft_vocab_size": 128, "depth": 3, "taps": [0, 1, 2]},
    )
    assert "taps (store: 1, 2, 3, final" in " ".join(train(world, str(other), status=2).split())
    assert json.loads((run / "features/manifest.json").read_text())["complete"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["eagle3", "medusa"])
def test_two_ranks_train_like_one(world: Path, family: str) -> None:
    drafter: dict[str, Any] = {"family": family}
    if family == "eagle3":
        drafter |= {"draft_vocab_size": 128, "depth": 3}
    # An odd number of rows: at the end of an epoch one rank has none.
    data = {"held_out": 5}
    common = {"drafter": drafter, "data": data, "evaluation": {"every": None, "prompts": 0}}
    training = {"epochs": 2, "max_steps": None, "packing": False}
    one, two = world / f"one-{family}", world / f"two-{family}"
    train(world, str(recipe(world, one, **common, training=training)))
    path = recipe(world, two, **common, training={**training, "accumulation": 1})
    assert "Warning" not in train(world, str(path), ranks=2)  # of libraries, which a user cannot mend
    first, second = metrics(one), metrics(two)
    assert len(first) == len(second) > 2
    for ours, theirs in zip(first, second, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
    ours, theirs = load_file(one / "draft/model.safetensors"), load_file(two / "draft/model.safetensors")
    assert ours.keys() == theirs.keys()


def test_a_second_run_in_one_folder_is_refused(world: Path) -> None:
    path = recipe(world, world / "shared")
    with exclusive(world / "shared" / LOCK, "testing"):
        done = subprocess.run(
            command(str(path)), env=environment(world), capture_output=True, text=True, timeout=400, cwd=world
        )
    assert done.returncode == 2
    assert "another process is training into this folder" in " ".join(done.stderr.split())
    assert [file.name for file in (world / "shared").iterdir()] == [LOCK]


def test_zero_that_would_become_ddp_is_refused(world: Path) -> None:
    """Case 38 of docs/cases.md."""
    path = recipe(world, world / "zero")
    env = {**environment(world), "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command(str(path)), env=env, capture_output=True, text=True, timeout=400, cwd=world)
    assert done.returncode == 2
    assert "ZeRO" in done.stderr and "Traceback" not in done.stderr


def test_several_processes_that_accelerate_does_not_start_are_missed(world: Path) -> None:
    path = recipe(world, world / "alone")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*launch, str(ROOT / "drafttrain/train.py"), str(path)],
        env=environment(world),
        capture_output=True,
        text=True,
        timeout=400,
        cwd=world,
    )
    assert done.returncode != 0
    assert "asked for 2 processes, accelerate set up 1" in " ".join(done.stderr.split())


def test_a_run_that_goes_on_with_another_recipe_keeps_the_one_before(world: Path, unbroken: Path) -> None:
    run = world / "changed"
    shutil.copytree(unbroken, run)
    path = recipe(world, run)
    before = (run / "recipe.yaml").read_bytes()
    said = " ".join(train(world, str(path), "training.lr=1e-3", status=2).split())
    assert "has done its 12 steps" in said and "training.lr 0.003 -> 0.001" in said
    assert (run / "recipe.yaml").read_bytes() == before
    said = " ".join(train(world, str(path), "training.lr=1e-3", "training.max_steps=13").split())
    assert "from step 12 on the recipe is another" in said and "training.max_steps 12 -> 13" in said
    assert (run / "recipe-until-step-00000012.yaml").read_bytes() == before
    assert "lr: 0.001" in (run / "recipe.yaml").read_text() and len(metrics(run)) == 13


def test_a_checkpoint_of_another_run_is_refused_and_never_starts_afresh(world: Path, unbroken: Path) -> None:
    run = world / "other"
    shutil.copytree(unbroken, run)
    path = recipe(world, run, drafter={"family": "eagle3", "draft_vocab_size": 100, "depth": 3})
    said = " ".join(train(world, str(path), status=2).split())
    assert "belongs to another run" in said and "--resume never" in said
    assert "drafter.draft_vocab_size (checkpoint: 128, here: 100)" in said and "drafter.family" not in said
    # What the recipe alone tells is refused before anything is loaded.
    said = train(world, str(path), "training.seed=7", status=2)
    assert "seed (checkpoint:" in said and "loading the target" not in said
    # Nothing is measured this time: the best draft of the other run is not this one's.
    train(world, str(path), "--resume", "never", "evaluation.prompts=0")
    assert (run / "checkpoints.1/step-00000012").is_dir() and (run / "metrics.jsonl.1").exists()
    assert len(metrics(run)) == 12
    assert read_json(run / "best/draft.json")["draft_vocab_size"] == 100
    assert read_json(run / "best.1/draft.json")["draft_vocab_size"] == 128
    # Nor is the one before it goes on.
    train(world, str(path), "evaluation.prompts=0", "training.max_steps=13")
    assert read_json(run / "best/draft.json")["provenance"]["step"] == 13
