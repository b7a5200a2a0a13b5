"""Training on a GPU that is not there: targets, features, drafts, losses, optimiser and checkpoints, against a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from rich.console import Console

from drafttrain.drafters.saving import load_draft
from drafttrain.errors import RecipeError
from drafttrain.features.building import build_store, open_store
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.prefetch import InTurn, Prefetcher
from drafttrain.features.sources import FeatureSource, OnlineFeatures, StoredFeatures
from drafttrain.losses.config import LossConfig
from drafttrain.losses.objective import Objective
from drafttrain.recipe.load import load_recipe
from drafttrain.training.distributed import make_accelerator
from drafttrain.training.run import train_recipe
from drafttrain.training.trainer import Trainer
from tests.draft_support import new_draft
from tests.pretend_cuda import OnCuda, pretended
from tests.tiny_trainer import CONFIGS, Recorder, tiny_config, tiny_trainer
from tests.tiny_training import samples, tiny_target
from tests.tiny_world import make_world, metrics
from tests.tiny_world import recipe as recipe_file
from tests.unit.features.test_store import IDENTITY, SPEC

Records = list[dict[str, Any]]
LOSSES: dict[str, list[dict[str, Any]]] = {
    "soft_ce": [{"name": "soft_ce"}],
    "all": [
        {"name": "lk", "full_target": True},
        {"name": "jsd"},
        {"name": "ce", "weight": 0.5},
        {"name": "top_k_ce"},
        {"name": "reverse_kl"},
    ],
    "features": [{"name": "forward_kl"}, {"name": "smooth_l1"}],
}


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    """accelerate decides on a device once a process."""
    forget()
    yield
    forget()


def forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def run(folder: Path, device: str, family: str = "eagle3", terms: str = "soft_ce", **values: Any) -> Records:
    """Records of two steps."""
    forget()
    target = tiny_target().to(device)
    drafter = new_draft(CONFIGS[family], tiny_target()).to(device)
    drafter.train().bind(target.embedding_weight, target.head())
    config = tiny_config(**{"max_steps": 2, "batch_rows": 2, "accumulation": 2, "lr": 1e-3, "clip_norm": 0.5, **values})
    trainer = tiny_trainer(make_accelerator(), config, folder / device, family, target=target, drafter=drafter)
    objective = Objective(LossConfig.model_validate({"terms": LOSSES[terms]}))
    trainer.objective = trainer.strategy._model.objective = objective
    assert trainer.device.type == ("cuda" if device.startswith("cuda") else "cpu")
    recorder = Recorder()
    trainer.fit([recorder])
    assert all(isinstance(p, OnCuda) == (device == "cuda") for p in trainer.drafter.parameters())
    return recorder.records


def same(ours: Records, theirs: Records, tolerance: float) -> None:
    assert len(ours) == len(theirs) > 0
    for mine, other in zip(ours, theirs, strict=True):
        for key in ("loss", "grad_norm"):
            assert mine[key] == pytest.approx(other[key], rel=tolerance), key
        assert mine["tokens"] == other["tokens"]


@pytest.mark.parametrize(
    ("family", "precision"),
    [("eagle3", "fp32"), *((family, "bf16") for family in CONFIGS if family != "eagle1-noise")],
)
def test_every_family(tmp_path: Path, family: str, precision: str) -> None:
    """Unrolled over packed documents, in bf16 by the calls of CUDA's flash attention; batches made ahead."""
    terms = "features" if family == "eagle1" else "soft_ce"
    values: dict[str, Any] = {"precision": precision, "packing": True}
    want = run(tmp_path, "cpu", family, terms, **values)
    with pretended(triton=False):
        got = run(tmp_path, "cuda", family, terms, prefetch=1, **values)
    same(got, want, 1e-4 if precision == "fp32" else 5e-2)


@pytest.mark.parametrize(("family", "terms"), [("eagle3", "all"), ("medusa", "all")])
def test_every_loss(tmp_path: Path, family: str, terms: str) -> None:
    """Without packing; activations made again in the backward pass."""
    want = run(tmp_path, "cpu", family, terms, gradient_checkpointing=True)
    with pretended(triton=False):
        same(run(tmp_path, "cuda", family, terms, gradient_checkpointing=True), want, 1e-4)


def test_cross_entropy_by_its_kernel(tmp_path: Path) -> None:
    want = run(tmp_path, "cpu")
    with pretended() as launched:
        same(run(tmp_path, "cuda"), want, 1e-4)
    assert "_soft_ce" in launched


def test_a_draft_lm_takes_packed_rows_to_the_flash_kernel(tmp_path: Path) -> None:
    """Under autocast its queries are fp32 behind the rotary embedding, and are cast for the kernel."""
    with pretended(triton=False) as launched:
        run(tmp_path, "cuda", "draft_lm", precision="bf16", packing=True)
    assert "_flash_attention_forward" in launched


@pytest.mark.parametrize("family", ["eagle3", "eagle1-noise"])
def test_a_run_that_is_resumed(tmp_path: Path, family: str) -> None:
    """Checkpoints, moments of the fused optimiser and the draft's own random numbers come back from a GPU to it."""

    def make(folder: str, steps: int) -> Trainer:
        forget()
        target = tiny_target().to("cuda")
        drafter = new_draft(CONFIGS[family], tiny_target()).to("cuda")
        drafter.train().bind(target.embedding_weight, target.head())
        config = tiny_config(max_steps=steps, batch_rows=2, lr=1e-2, schedule="constant", save_every=2)
        return tiny_trainer(make_accelerator(), config, tmp_path / folder, family, target=target, drafter=drafter)

    with pretended(triton=False):
        recorder = Recorder()
        make("unbroken", 3).fit([recorder])
        first = make("broken", 2)
        first.fit()
        second, again = make("broken", 3), Recorder()
        second.restore("auto")
        steps = [entry["step"] for entry in second.optimizer.state.values()]
        assert steps and all(step.is_cuda for step in steps)
        second.fit([again])
    for key in ("loss", "grad_norm"):
        assert [r[key] for r in again.records] == [r[key] for r in recorder.records[2:]]


@pytest.mark.parametrize("kind", ["online", "offline", "fp8"])
def test_batches_are_the_same_ahead_and_in_turn(tmp_path: Path, kind: str) -> None:
    """Copies through pinned memory, and a stream and threads of their own."""
    data = samples(12)
    order = [[[sample], [other]] for sample, other in zip(data, data[::-1], strict=True)]
    if kind != "online":
        config = FeaturesConfig(source="offline", batch_tokens=64, dtype="fp8" if kind == "fp8" else "fp32")
        identity = IDENTITY if kind != "fp8" else replace(IDENTITY, dtype="fp8")
        build_store(tmp_path / "store", identity, tiny_target(), data, config)

    def source(device: str) -> FeatureSource:
        if kind == "online":
            return OnlineFeatures(tiny_target().to(device), SPEC, batch_tokens=64)
        return StoredFeatures(open_store(tmp_path / "store", identity, data), workers=2)

    want = [list(InTurn(source("cpu"), torch.device("cpu")).take(rows).batch.tensors()) for rows in order]
    with pretended(triton=False):
        batches = Prefetcher(source("cuda"), torch.device("cuda"), 2, iter(order))
        for rows, theirs in zip(order, want, strict=True):
            ours = list(batches.take(rows).batch.tensors())
            assert all(x.is_cuda for x in ours)
            # SDPA's kernels for CPUs round otherwise than what is computed for a GPU here.
            tolerance = 1e-5 if kind == "online" else 0.0
            for mine, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(mine.cpu(), other, rtol=tolerance, atol=tolerance)
        batches.close()


def test_a_store_is_written_from_a_gpu(tmp_path: Path) -> None:
    data = samples(6)
    config = FeaturesConfig(source="offline", batch_tokens=64)
    build_store(tmp_path / "cpu", IDENTITY, tiny_target(), data, config)
    with pretended(triton=False):
        build_store(tmp_path / "cuda", IDENTITY, tiny_target().to("cuda"), data, config)
    stores = [open_store(tmp_path / name, IDENTITY, data) for name in ("cpu", "cuda")]
    for sample in data:
        (ours, top1), (theirs, other) = (store.read(sample, "cpu") for store in stores)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert torch.equal(top1, other)


def test_a_run_from_the_recipe_to_the_draft(tmp_path: Path) -> None:
    """Prompts, target, features, training, acceptance in the engine, checkpoints and the saved draft, all of it "auto";
    a target that would lie elsewhere is refused before it is loaded."""
    world = make_world(tmp_path)
    sections: dict[str, Any] = {"target": {"device": "auto"}, "training": {"precision": "bf16", "max_steps": 2}}
    path = recipe_file(world, tmp_path / "run", evaluation={"every": 2, "prompts": 2}, **sections)
    elsewhere = recipe_file(world, tmp_path / "elsewhere")
    said = Console(file=StringIO(), width=200)
    with pretended(triton=False) as launched:
        with pytest.raises(RecipeError, match=r"is cpu, which is cpu here, and this process trains on cuda:0"):
            train_recipe(load_recipe(elsewhere), "auto", said)
        result = train_recipe(load_recipe(path), "auto", said)
        assert result.finished and result.state.step == 2 and result.state.best_tau is not None
        assert "_flash_attention_forward" in launched
        drafter, _ = load_draft(tmp_path / "run" / "draft", "cuda")
        assert all(p.is_cuda for p in drafter.parameters())
    assert not torch.cuda.is_available()
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2]
    assert "training 2 steps on 1 process(es), cuda" in said.file.getvalue()  # type: ignore[attr-defined]
