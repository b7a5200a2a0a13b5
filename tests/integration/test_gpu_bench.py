"""The script that a GPU is to run, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_tiny_variant_writes_its_tables(tmp_path: Path) -> None:
    command = [sys.executable, "eval/gpu_bench.py", "--tiny", "--batch", "2", "--rounds", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "gpu_bench.json").read_text(encoding="utf-8"))
    assert all(found["only_ties"] for found in result["identity"].values())
    rows = {row["what"]: row for row in result["rows"]}
    assert list(rows) == ["plain", "verify 6", "verify 16", "verify 60", *(f"EAGLE-3, {s}" for s in SHAPES)]
    assert rows["plain"]["tau"] == 1.0
    for name in SHAPES:
        row = rows[f"EAGLE-3, {name}"]
        # The synthetic choice accepts, and no speed-up passes what the parts of a round allow by more than noise.
        assert 1.0 <= row["tau"] <= 7.0
        assert row["round_ms"] >= row["verify_ms"] > 0


SHAPES = ["chain 6", "tree 16", "tree 60"]


def test_without_a_gpu_the_full_run_is_refused(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, "eval/gpu_bench.py", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 2 and "--tiny runs anywhere" in done.stderr
