"""Tests that a GPU owes can be called at all: those of `tests/gpu`, on a GPU that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu import test_device_rounds as rounds
from tests.gpu import test_losses_and_attention as losses
from tests.gpu import test_prefetch as prefetch
from tests.pretend_cuda import pretended


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
