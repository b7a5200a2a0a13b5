"""What a GPU owes can be called at all: tests of `tests/gpu` and `eval/gpu_bench.py`, on a GPU that is not there."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import test_device_rounds as rounds
from tests.gpu import test_losses_and_attention as losses
from tests.gpu import test_prefetch as prefetch
from tests.pretend_cuda import pretended
from tests.tiny_world import ROOT


@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
def test_graphs(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "REQUESTS", rounds.REQUESTS[:3])
    with pretended(triton=False):
        rounds.test_graphs_play_the_host_s_rounds(shape, "llama")
        rounds.test_nothing_in_a_round_synchronises()
        rounds.test_a_graph_reads_its_inputs_anew()


def test_losses_and_attention() -> None:
    with pretended(triton=False):
        for packed in (False, True):
            losses.test_flash_equals_reference(packed, 3, torch.bfloat16)
        losses.test_objective_equals_cpu()


@pytest.mark.parametrize("kind", ["online", "stored"])
def test_batches_ahead(tmp_path: Path, kind: str) -> None:
    with pretended(triton=False):
        prefetch.test_a_pinned_copy_is_a_copy(torch.uint8)
        prefetch.test_what_is_used_is_what_was_made(tmp_path, kind, 3)


def test_the_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tables and its comparison of greedy outputs, in bf16, its graphs recorded; not its times."""
    options = ["--tiny", "--batch", "2", "--rounds", "2", "--context", "8", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["gpu_bench.py", *options])
    with pretended(triton=False):
        runpy.run_path(str(ROOT / "eval/gpu_bench.py"), run_name="__main__")
    result = json.loads((tmp_path / "gpu_bench.json").read_text())
    assert result["device"] == "Pretended" and result["dtype"] == "torch.bfloat16"
    assert len(result["rows"]) == 7 and all(found["only_ties"] for found in result["identity"].values())
