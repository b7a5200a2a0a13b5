"""What comparing values does not show: kernels compile for the GPUs that are in use without spilling, and touch no
memory that is not theirs. Both in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPS = ["tree_attention", "tree_walk", "kv_compact", "draft_topk", "soft_ce"]


def run(*arguments: str, interpret: bool) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("op", OPS)
def test_no_register_is_spilled(op: str, arch: int) -> None:
    """Head widths 64 and 128, trees of 8, 16 and 64 nodes among the cases of `aot`."""
    done = run("-m", "tests.kernels.aot", op, str(arch), interpret=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report and all(case["registers"] > 0 for case in report)
    # The sampled walk, all control flow, spills 8 bytes on sm_80.
    allowed = 16 if op == "tree_walk" else 0
    assert [case for case in report if case["spilled"] > allowed] == []


@pytest.mark.parametrize("op", OPS)
def test_nothing_behind_a_tensor_is_touched(op: str) -> None:
    """Every tensor ends at a page that must not be read: a stray load kills the process."""
    done = run("-m", "tests.kernels.guarded", op, interpret=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "whole"


def test_the_guard_bites() -> None:
    """Negative control: a kernel that reads one entry too many does not live."""
    done = run("-m", "tests.kernels.guarded", "stray", interpret=True)
    assert done.returncode != 0 and "whole" not in done.stdout
