"""No export needs more than twice the draft's size, measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drafttrain.drafters.build import build_drafter
from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.drafters.saving import WEIGHTS, save_draft
from tests.foreign_support import target_folder
from tests.support import tiny_hf

ROOT = Path(__file__).resolve().parents[3]
NOISE = 8 << 20


def draft(folder: Path, config: DrafterConfig, target: str, **sizes: Any) -> int:
    """A saved draft of random weights; its size in bytes."""
    text = tiny_hf(num_hidden_layers=8, **sizes).config
    drafter = build_drafter(config, text)
    save_draft(folder / "draft", drafter, target={"name": target, "vocab_size": text.vocab_size})
    return (folder / "draft" / WEIGHTS).stat().st_size


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's account of memory")
@pytest.mark.parametrize(
    ("config", "engines"),
    [
        (Eagle3Config(taps=(5, 1), draft_vocab_size=None), ["vllm", "speculators", "sglang", "trtllm"]),
        (MedusaConfig(num_heads=2), ["vllm"]),
        (DraftLMConfig(init="scratch", num_layers=1), ["hf", "gguf"]),
    ],
    ids=lambda value: getattr(value, "family", None),
)
def test_twice_the_draft_is_enough(config: DrafterConfig, engines: list[str], tmp_path: Path) -> None:
    """The largest tensor is most of the draft: whoever copies it as a whole is found."""
    target_folder(tmp_path / "target")  # a GGUF file holds its tokenizer
    target = str(tmp_path / "target")
    draft(tmp_path / "small", config, target, vocab_size=512)
    size = draft(tmp_path / "large", config, target, hidden_size=256, vocab_size=32768)
    command = [
        sys.executable,
        "-m",
        "tests.unit.export.export_memory",
        str(tmp_path / "small"),
        str(tmp_path / "large"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([*command, *engines], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peaks = [int(line) for line in done.stdout.split()]
    print(f"{config.family}: draft {size / 2**20:.1f} MiB, peaks {[f'{p / 2**20:.1f}' for p in peaks]} MiB")
    assert len(peaks) == len(engines)
    # Above the draft itself, which is mapped: else nothing was measured.
    assert all(0.5 * size < found <= 2 * size + NOISE for found in peaks)


def test_the_size_is_far_above_the_noise() -> None:
    assert 32768 * 256 * torch.float32.itemsize > 3 * NOISE
