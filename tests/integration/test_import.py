"""A draft made elsewhere, by hand: imported, measured, trained further, exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.cli.main import main
from drafttrain.drafters.saving import read_meta
from drafttrain.export.ir import read_ir
from drafttrain.files import read_json
from drafttrain.modeling.vocab_map import VocabMap
from tests.foreign_support import target_folder
from tests.unit.export.test_foreign import World, eagle3_tensors, llama, write

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS = ["one two three", "Write a line.", "你好", "def add(a, b):", "five six", "seven"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft in the original EAGLE-3 layout with another rotary base, prompts and a suite."""
    folder = tmp_path_factory.mktemp("import")
    target, config = target_folder(folder / "target", max_position_embeddings=256)
    world = World(target, config, torch.arange(3, 14))
    tensors = eagle3_tensors(world, "midlayer", 40)
    write(folder / "theirs", llama(world, draft_vocab_size=40, rope_theta=777.0), tensors, "pytorch_model.bin")
    rows = [{"id": f"p{i}", "category": "all", "turns": [text]} for i, text in enumerate(QUESTIONS[:2])]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "suite.yaml").write_text(
        f"name: tiny\nprompts: {folder}/prompts.jsonl\nk: [2]\ntemperatures: [0.0]\nbatch: [2]\ndrafts: [run]\n"
        "max_new_tokens: 12\nchunk: 2\nwarmup: 0\nbootstrap: 100\n",
        encoding="utf-8",
    )
    with (folder / "conversations.jsonl").open("w", encoding="utf-8") as file:
        for i, text in enumerate(QUESTIONS):
            answer = {"role": "assistant", "content": f"{text} {text} and so on"}
            file.write(json.dumps({"id": f"c{i}", "messages": [{"role": "user", "content": text}, answer]}) + "\n")
    return folder


def train(home: Path, *arguments: str) -> None:
    """In a process of its own: accelerate keeps state."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "DRAFTTRAIN_CACHE": str(home / "cache"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "drafttrain", "train", *arguments]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(900)
def test_the_whole_way(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, tuned = home / "mine", home / "mine-tuned"
    assert main(["import", str(home / "theirs"), "--target", str(home / "target"), "-o", str(run)]) == 0

    assert main(["eval", str(run), "--suite", str(home / "suite.yaml"), "--no-leaderboard"]) == 0
    entry = next(e for e in read_json(run / "eval/tiny/result.json")["drafts"] if e["draft"] == "mine")
    assert entry["family"] == "eagle3" and entry["exact"]["rate"] == 1.0

    settings = "training.max_steps=2 training.epochs=null training.batch_rows=2 training.row_length=128"
    data = f"data.prompts=[{{source: {home}/conversations.jsonl}}]"
    others = "data.answers.source=given data.max_length=128 data.held_out=0 evaluation.prompts=0 drafter.depth=2"
    train(home, str(run), *settings.split(), data, *others.split(), "training.precision=fp32")
    before, after = read_ir(run), read_ir(tuned)
    theirs = torch.load(home / "theirs" / "pytorch_model.bin", weights_only=True)
    assert after.vocab_map == before.vocab_map == VocabMap(theirs["d2t"], theirs["t2d"])
    assert after.arch == before.arch and after.sizes.rope_parameters["rope_theta"] == 777.0
    assert not torch.equal(after.tensors["fc.weight"], before.tensors["fc.weight"])
    assert read_meta(tuned / "draft").config.depth == 2

    capsys.readouterr()
    assert main(["export", str(run), "--to", "vllm"]) == 0
    assert "the server's own counters should show: mean acceptance length" in capsys.readouterr().out
    stored = load_file(run / "export" / "vllm" / "model.safetensors")
    assert all(torch.equal(stored[name], tensor) for name, tensor in theirs.items())
    assert read_json(run / "export/vllm/drafttrain.json")["forecast"]["k"] == 2
