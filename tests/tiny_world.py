"""A tiny target with conversations on disk, and `drafttrain train` on it in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from tests.chats import CHATML, chat_tokenizer

ROOT = Path(__file__).resolve().parents[1]
STABLE = ("step", "epoch", "loss", "accuracy", "lr", "grad_norm", "tokens")


def save_target(folder: Path, spare: int = 0, **shape: Any) -> Path:
    """Save a random Llama and a tokenizer that can chat, as `target.model` takes them.

    Args:
        spare: rows of the head beyond the tokenizer's tokens.
        shape: of the config, where it is to differ.
    """
    tokenizer = chat_tokenizer(CHATML)
    torch.manual_seed(0)
    values = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        **shape,
    }
    config = LlamaConfig(vocab_size=len(tokenizer) + spare, eos_token_id=tokenizer.eos_token_id, **values)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_world(folder: Path) -> Path:
    """Fill a folder with a tiny target and answered conversations."""
    save_target(
        folder / "target", spare=3, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2
    )
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    with (folder / "conversations.jsonl").open("w") as file:
        for number in range(24):
            question = " ".join(words[(number * 5 + i) % 12] for i in range(3 + number % 5))
            answer = " ".join(words[(number + i) % 12] for i in range(4 + number % 9))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"id": f"c{number}", "messages": messages}) + "\n")
    return folder


def recipe(world: Path, run: Path, **sections: dict[str, Any]) -> Path:
    """A recipe file for a run in `run`; sections are merged into the defaults."""
    values: dict[str, dict[str, Any]] = {
        "target": {"model": str(world / "target"), "dtype": "float32", "device": "cpu"},
        "data": {
            "prompts": [{"source": str(world / "conversations.jsonl")}],
            "answers": {"source": "given"},
            "max_length": 128,
            "held_out": 4,
        },
        "features": {"source": "online"},
        "drafter": {"family": "eagle3", "draft_vocab_size": 128, "depth": 3},
        "loss": {"terms": [{"name": "soft_ce"}]},
        "training": {
            "max_steps": 12,
            "batch_rows": 2,
            "accumulation": 2,
            "row_length": 128,
            "lr": 3.0e-3,
            "precision": "fp32",
            "log_every": 1,
            "save_every": 4,
        },
        "evaluation": {"every": 6, "prompts": 4, "k": 3, "max_new_tokens": 12},
    }
    for name, section in sections.items():
        values[name] = section if name == "drafter" else {**values.get(name, {}), **section}
    run.parent.mkdir(parents=True, exist_ok=True)
    path = run.parent / f"{run.name}.yaml"
    path.write_text(yaml.safe_dump({"name": "tiny", "output_dir": str(run), **values}))
    return path


def command(*arguments: str, ranks: int = 1, launch: str = "cpu") -> list[str]:
    """`drafttrain train ARGUMENTS`, for several ranks through `accelerate launch` and a launch config that ships."""
    if ranks == 1:
        return [sys.executable, str(ROOT / "drafttrain/train.py"), *arguments]
    start = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    start += [f"{ROOT}/recipes/accelerate/{launch}.yaml", "--main_process_port", "0", "--num_processes", str(ranks)]
    return [*start, str(ROOT / "drafttrain/train.py"), *arguments]


def environment(world: Path) -> dict[str, str]:
    """Of a run: offline, one thread, a cache of its own."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "DRAFTTRAIN_CACHE": str(world / "cache"), "HF_HUB_OFFLINE": "1"}


def train(world: Path, *arguments: str, ranks: int = 1, status: int = 0, launch: str = "cpu") -> str:
    """Train and return what was said; fails where the exit status is another."""
    done = subprocess.run(
        command(*arguments, ranks=ranks, launch=launch),
        env=environment(world),
        capture_output=True,
        text=True,
        timeout=600,
        cwd=world,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    """Records of a run."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def curve(run: Path) -> list[list[Any]]:
    """What must not depend on interruptions."""
    return [[record[key] for key in STABLE] for record in metrics(run)]
