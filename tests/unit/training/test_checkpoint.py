from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drafttrain.errors import CheckpointError
from drafttrain.training.checkpoint import (
    TrainState,
    load_checkpoint,
    newest_whole,
    save_checkpoint,
    set_aside,
)
from drafttrain.training.strategies.base import Snapshot, kept_tensors, on_cpu
from drafttrain.training.strategies.replicated import load_moments, load_weights, optimizer_tensors

FINGERPRINT = {"seed": 1, "data": "abc"}


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in kept_tensors(model).items()}


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    weights = {name: on_cpu(tensor) for name, tensor in kept_tensors(model).items()}
    return Snapshot(weights, optimizer_tensors(model, optimizer))


def load(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, fingerprint: dict[str, Any] = FINGERPRINT
) -> TrainState:
    state, found = load_checkpoint(path, shapes(model), fingerprint)
    load_weights(model, found.weights)
    load_moments(model, optimizer, found.moments)
    return state


def model_and_optimizer(seed: int, size: int = 5) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, size), nn.LayerNorm(size))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def train(model: nn.Module, optimizer: torch.optim.AdamW, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = (model(torch.randn(8, 4)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def save(folder: Path, step: int, keep: int = 2) -> tuple[nn.Module, torch.optim.AdamW]:
    model, optimizer = model_and_optimizer(0)
    train(model, optimizer, 3)
    save_checkpoint(folder, TrainState(step=step, row=7), snapshot(model, optimizer), shapes(model), FINGERPRINT, keep)
    return model, optimizer


def test_weights_moments_and_state_come_back_exactly(tmp_path: Path) -> None:
    model, optimizer = save(tmp_path, 3)
    other, other_optimizer = model_and_optimizer(1)
    state = load(tmp_path / "step-00000003", other, other_optimizer)
    assert state == TrainState(step=3, row=7)
    assert train(other, other_optimizer, 4) == train(model, optimizer, 4)


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9)
    (tmp_path / ".step-00000009.xyz.part").mkdir()
    (tmp_path / "step-00000004").mkdir()
    damaged = tmp_path / "step-00000003/model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    warnings: list[str] = []
    assert newest_whole(tmp_path, warnings.append) == tmp_path / "step-00000002"
    assert len(warnings) == 2 and "step-00000003/model.safetensors" in warnings[1]
    flipped = tmp_path / "step-00000002/optimizer.safetensors"
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    assert newest_whole(tmp_path, warnings.append) == tmp_path / "step-00000001"
    assert newest_whole(tmp_path / "nowhere", warnings.append) is None


@pytest.mark.parametrize("lost", ["fingerprint", "state", "files"])
def test_one_with_another_description_is_not_whole(tmp_path: Path, lost: str) -> None:
    save(tmp_path, 1)
    file = tmp_path / "step-00000001/checkpoint.json"
    meta = json.loads(file.read_text())
    file.write_text(json.dumps({**meta, lost: ["nothing"]}))
    warnings: list[str] = []
    assert newest_whole(tmp_path, warnings.append) is None
    assert "no whole checkpoint" in warnings[0]


def test_only_the_newest_are_kept_and_left_overs_go(tmp_path: Path) -> None:
    (tmp_path / ".step-00000001.xyz.part").mkdir()
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_failed_save_leaves_the_older_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drafttrain.training.checkpoint.save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert newest_whole(tmp_path, lambda message: None) == tmp_path / "step-00000001"


def test_another_run_or_draft_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-00000001"
    model, optimizer = model_and_optimizer(0)
    with pytest.raises(CheckpointError, match=r"seed .checkpoint: 1, here: 2"):
        load(path, model, optimizer, {"seed": 2, "data": "abc"})
    # One from before it was kept does not say on which frozen weights it was trained.
    load(path, model, optimizer, {**FINGERPRINT, "frozen": "f"})
    with pytest.raises(CheckpointError, match="another run; what differs: packing"):
        load(path, model, optimizer, {**FINGERPRINT, "packing": True})
    wider, wider_optimizer = model_and_optimizer(0, size=6)
    with pytest.raises(CheckpointError, match=r"other shapes .*0\.bias"):
        load(path, wider, wider_optimizer)
    longer = nn.Sequential(*model, nn.Linear(5, 5))
    with pytest.raises(CheckpointError, match=r"missing .*2\.bias"):
        load(path, longer, torch.optim.AdamW(longer.parameters()))
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        load(tmp_path / "step-00000009", model, optimizer)


def test_shards_and_frozen_weights_are_never_written(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer(0)
    model[0].weight.requires_grad_(False)
    assert set(shapes(model)) == {"0.bias", "1.weight", "1.bias"}
    whole = snapshot(model, optimizer)
    frozen = Snapshot({**whole.weights, "0.weight": model[0].weight.detach()}, {})
    shard = Snapshot({**whole.weights, "0.bias": whole.weights["0.bias"][:2]}, {})
    for wrong, name in ((frozen, "0.weight"), (shard, "0.bias"), (Snapshot({}, {}), "0.bias")):
        with pytest.raises(RuntimeError, match=f"exactly what is trained.*{name}"):
            save_checkpoint(tmp_path, TrainState(step=1), wrong, shapes(model), FINGERPRINT, 2)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    save(tmp_path, 1)
    names = {path.suffix for path in (tmp_path / "step-00000001").iterdir()}
    assert names == {".safetensors", ".json"}


def test_an_earlier_run_is_set_aside_not_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(folder, 1)
    assert set_aside(folder) == tmp_path / "checkpoints.1"
    save(folder, 2)
    assert set_aside(folder) == tmp_path / "checkpoints.2"
    assert (tmp_path / "checkpoints.1/step-00000001").is_dir()
    assert set_aside(folder) is None
