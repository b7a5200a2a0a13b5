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
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.drafters.saving import WEIGHTS, save_draft
from drafttrain.targets.load import load_identity
from tests.foreign_support import target_folder
from tests.support import tiny_hf

ROOT = Path(__file__).resolve().parents[3]
NOISE = 8 << 20
LARGE = {"hidden_size": 256, "vocab_size": 32768}
LINUX = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's account of memory")


def draft(folder: Path, config: DrafterConfig, target: str, **sizes: Any) -> int:
    """A saved draft of random weights; its size in bytes."""
    text = tiny_hf(num_hidden_layers=8, **sizes).config
    drafter = build_drafter(config, text)
    save_draft(folder / "draft", drafter, target={"name": target, "vocab_size": text.vocab_size})
    return (folder / "draft" / WEIGHTS).stat().st_size


def peaks(small: Path, large: Path, engines: list[str]) -> list[int]:
    """Bytes that an export for each engine takes, above what its process held before."""
    command = [sys.executable, "-m", "tests.unit.export.export_memory", str(small), str(large), *engines]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


@pytest.mark.parametrize(
    ("config", "engines", "sizes"),
    [
        (Eagle3Config(taps=(5, 1), draft_vocab_size=None), ["vllm", "speculators", "sglang", "trtllm"], LARGE),
        # Without a head: its fc and its MLP are the draft.
        (Eagle1Config(), ["vllm", "sglang"], {"hidden_size": 1024, "intermediate_size": 2048, "vocab_size": 512}),
        (MedusaConfig(num_heads=2), ["vllm"], LARGE),
        (DraftLMConfig(init="scratch", num_layers=1), ["vllm", "sglang", "trtllm", "hf", "gguf"], LARGE),
    ],
    ids=lambda value: getattr(value, "family", None),
)
@LINUX
def test_twice_the_draft_is_enough(
    config: DrafterConfig, engines: list[str], sizes: dict[str, int], tmp_path: Path
) -> None:
    """The largest tensor is much of the draft: whoever copies it as a whole is found."""
    target_folder(tmp_path / "target")  # a GGUF file holds its tokenizer
    target = str(tmp_path / "target")
    draft(tmp_path / "small", config, target, vocab_size=512)
    size = draft(tmp_path / "large", config, target, **sizes)
    found = peaks(tmp_path / "small", tmp_path / "large", engines)
    print(f"{config.family}: draft {size / 2**20:.1f} MiB, peaks {[f'{p / 2**20:.1f}' for p in found]} MiB")
    assert len(found) == len(engines) and size > 3 * NOISE
    # Above the draft itself, which is mapped: else nothing was measured.
    assert all(0.5 * size < peak <= 2 * size + NOISE for peak in found)


@LINUX
def test_of_a_target_its_head_alone_is_read(tmp_path: Path) -> None:
    """A Medusa draft that reads the target's head, which counts as the draft's: nothing else of the target fits."""
    config = MedusaConfig(num_heads=2, head="target")
    sizes = {"small": {}, "large": {**LARGE, "intermediate_size": 4096}}
    for name, changes in sizes.items():
        target, about = target_folder(tmp_path / name / "target", **changes)
        drafter = build_drafter(config, target.config)
        save_draft(tmp_path / name / "draft", drafter, target=load_identity(about).to_dict())
    drafts = (tmp_path / "large" / "draft" / WEIGHTS).stat().st_size
    size = drafts + LARGE["vocab_size"] * LARGE["hidden_size"] * torch.float32.itemsize
    (found,) = peaks(tmp_path / "small", tmp_path / "large", ["vllm"])
    whole = (tmp_path / "large" / "target" / WEIGHTS).stat().st_size
    print(f"draft and head {size / 2**20:.1f} MiB, target {whole / 2**20:.1f} MiB, peak {found / 2**20:.1f} MiB")
    assert whole > 4 * size
    assert 0.5 * size < found <= 2 * size + NOISE
