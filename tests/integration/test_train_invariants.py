"""What must not change the gradient: padding, packing, accumulation, interruption."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import Drafter
from drafttrain.errors import CheckpointError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.training.distributed import make_accelerator
from drafttrain.training.trainer import NonFiniteError, Trainer
from tests.tiny_trainer import FAMILIES, Recorder, tiny_config, tiny_trainer
from tests.tiny_training import samples, tiny_target


def make(
    folder: Path,
    family: str = "eagle3",
    data: list[Sample] | None = None,
    target: CausalLM | None = None,
    drafter: Drafter | None = None,
    **values: Any,
) -> Trainer:
    config = tiny_config(**{"max_steps": 6, "batch_rows": 2, "lr": 1e-2, **values})
    return tiny_trainer(make_accelerator(), config, folder, family, data, target, drafter)


def run(trainer: Trainer) -> list[dict[str, Any]]:
    recorder = Recorder()
    trainer.fit([recorder])
    return recorder.records


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in trainer.drafter.named_parameters()}


def watch_gradients(trainer: Trainer) -> list[dict[str, Tensor]]:
    """Gradients of each step, as the optimiser sees them."""
    seen: list[dict[str, Tensor]] = []
    step = trainer.optimizer.step

    def spy() -> None:
        named = trainer.drafter.named_parameters()
        seen.append({name: p.grad.clone() for name, p in named if p.grad is not None})
        step()

    trainer.optimizer.step = spy  # type: ignore[method-assign,assignment]
    return seen


def assert_same_training(ours: Trainer, theirs: Trainer, tolerance: float = 2e-4) -> None:
    mine_seen, other_seen = watch_gradients(ours), watch_gradients(theirs)
    first, second = run(ours), run(theirs)
    assert mine_seen[0].keys() == other_seen[0].keys()
    for name, gradient in mine_seen[0].items():
        torch.testing.assert_close(gradient, other_seen[0][name], rtol=1e-4, atol=1e-6)
    assert len(first) == len(second) > 0
    for mine, other in zip(first, second, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=tolerance)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=tolerance * 10)
        assert mine["accuracy"] == other["accuracy"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_learns(tmp_path: Path, family: str) -> None:
    data = samples(4)
    records = run(make(tmp_path, family, data, batch_rows=4, max_steps=40, warmup=2, schedule="constant"))
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["accuracy"][0] > max(0.3, records[0]["accuracy"][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_every_trainable_parameter_gets_a_gradient(tmp_path: Path, family: str) -> None:
    # DDP waits for the gradient of each; one that is never used would stop several ranks.
    trainer = make(tmp_path, family, max_steps=1)
    seen = watch_gradients(trainer)
    run(trainer)
    assert seen[0].keys() == {name for name, p in trainer.drafter.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("family", FAMILIES)
def test_accumulation_changes_nothing(tmp_path: Path, family: str) -> None:
    # Samples of different lengths: a mean per micro-batch would weigh their labels differently.
    whole = make(tmp_path / "a", family, batch_rows=4, accumulation=1)
    parts = make(tmp_path / "b", family, batch_rows=1, accumulation=4)
    assert_same_training(whole, parts)


@pytest.mark.parametrize("family", FAMILIES)
def test_packing_changes_nothing(tmp_path: Path, family: str) -> None:
    # Windows of all samples: the same documents in every step, packed or one a row.
    data = samples(8)
    packed = make(tmp_path / "a", family, data, packing=True, batch_rows=8)
    padded = make(tmp_path / "b", family, data, packing=False, batch_rows=8)
    assert len(packed.order.epoch_rows(0)) < len(padded.order.epoch_rows(0))
    assert_same_training(packed, padded)


def test_the_partial_window_at_the_end_of_an_epoch_is_trained_on(tmp_path: Path) -> None:
    data = samples(5)
    trainer = make(tmp_path, data=data, max_steps=None, epochs=2, batch_rows=2, accumulation=2)
    records = run(trainer)
    assert [record["epoch"] for record in records] == [0, 0, 1, 1]
    assert sum(record["tokens"] for record in records) == 2 * sum(len(s.ids) for s in data)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["eagle3", "draft_lm", "eagle1-noise", "kept_head"])
def test_a_resumed_run_has_the_curve_of_an_unbroken_one(tmp_path: Path, family: str, precision: str) -> None:
    options: dict[str, Any] = {"precision": precision, "max_steps": 9, "epochs": None, "log_every": 2}
    unbroken = make(tmp_path / "a", family, **options)
    whole = run(unbroken)
    first = make(tmp_path / "b", family, save_every=3, **options)
    windows = first.order.windows()
    for _ in range(5):  # killed after step 5; the checkpoint is of step 3, in the middle of a log interval
        first._train_window(next(windows), [], _NeverStop())  # type: ignore[arg-type]
        if first.state.step == 3:
            first._save()
    second = make(tmp_path / "b", family, save_every=3, **options)
    second.restore("auto")
    assert second.state.step == 3
    rest = run(second)
    stable = ("step", "epoch", "loss", "accuracy", "lr", "grad_norm", "tokens")
    tail = [record for record in whole if record["step"] > 3]
    assert [[r[key] for key in stable] for r in rest] == [[r[key] for key in stable] for r in tail]
    for name, value in weights(second).items():
        assert torch.equal(value, weights(unbroken)[name])


def test_a_run_does_not_go_on_with_steps_of_another_size(tmp_path: Path) -> None:
    run(make(tmp_path, max_steps=2, batch_rows=2, accumulation=3))
    wider = make(tmp_path, max_steps=4, batch_rows=3, accumulation=1)
    with pytest.raises(CheckpointError, match=r"a step had 6 rows; here it has 3[^$]*training\.accumulation=2"):
        wider.restore("auto")
    odd = make(tmp_path, max_steps=4, batch_rows=4, accumulation=1)
    with pytest.raises(CheckpointError, match=r"6 must be a multiple of ranks x training\.batch_rows"):
        odd.restore("auto")
    same = make(tmp_path, max_steps=4, batch_rows=3, accumulation=2)
    same.restore("auto")
    assert same.state.step == 2


def steps_kept(trainer: Trainer) -> list[str]:
    return sorted(path.name for path in trainer.checkpoints.iterdir())


def test_a_run_that_goes_back_leaves_the_checkpoints_behind_it_aside(tmp_path: Path) -> None:
    first = make(tmp_path, max_steps=6, save_every=2, keep=9)
    run(first)
    assert steps_kept(first) == ["step-00000002", "step-00000004", "step-00000006"]
    back = make(tmp_path, max_steps=3, save_every=1, keep=1)
    back.restore(first.checkpoints / "step-00000002")
    run(back)
    # With 4 and 6 still there, the newest kept would be 6, and 3 be dropped.
    assert "step-00000003" in steps_kept(back)
    again = make(tmp_path, max_steps=6)
    again.restore("auto")
    assert again.state.step == 3
    assert {"step-00000004.1", "step-00000006.1"} <= set(steps_kept(back))


def test_checkpoints_that_cannot_be_read_do_not_push_out_those_that_can(tmp_path: Path) -> None:
    first = make(tmp_path, max_steps=4, save_every=2)
    run(first)
    for name in ("step-00000002", "step-00000004"):
        (first.checkpoints / name / "model.safetensors").write_bytes(b"")
    anew = make(tmp_path, max_steps=1, keep=2)
    anew.restore("auto")
    assert anew.state.step == 0
    run(anew)
    again = make(tmp_path, max_steps=4)
    again.restore("auto")
    assert again.state.step == 1


def test_a_stop_behind_a_save_does_not_write_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make(tmp_path, max_steps=6, save_every=2)
    saved: list[int] = []
    save = trainer._save

    def spy() -> None:
        saved.append(trainer.state.step)
        save()
        if trainer.state.step == 2:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(trainer, "_save", spy)
    assert not trainer.fit().finished
    assert saved == [2] and steps_kept(trainer) == ["step-00000002"]


class _NeverStop:
    asked = False


def test_master_weights_stay_fp32_under_autocast(tmp_path: Path) -> None:
    trainer = make(tmp_path, precision="bf16")
    run(trainer)
    assert {value.dtype for value in weights(trainer).values()} == {torch.float32}
    moments = [value for entry in trainer.optimizer.state.values() for value in entry.values()]
    assert moments and {value.dtype for value in moments} == {torch.float32}


def test_bf16_computes_in_bf16(tmp_path: Path) -> None:
    trainer = make(tmp_path, precision="bf16", max_steps=1)
    seen: list[torch.dtype] = []
    unroll = trainer.drafter.unroll

    def spy(batch: Any, depths: int) -> Any:
        outputs = unroll(batch, depths)
        seen.append(outputs[0].readout.dtype)
        return outputs

    trainer.drafter.unroll = spy  # type: ignore[method-assign]
    run(trainer)
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing_changes_nothing(tmp_path: Path, family: str) -> None:
    plain = make(tmp_path / "a", family)
    recomputed = make(tmp_path / "b", family, gradient_checkpointing=True)
    assert recomputed.drafter.gradient_checkpointing
    assert_same_training(plain, recomputed)


def test_clipping_bounds_the_global_norm(tmp_path: Path) -> None:
    trainer = make(tmp_path, clip_norm=1e-3, max_steps=1)
    norms: list[float] = []
    step = trainer.optimizer.step

    def spy() -> None:
        grads = [p.grad for p in trainer.drafter.parameters() if p.grad is not None]
        norms.append(float(torch.stack([g.square().sum() for g in grads]).sum().sqrt()))
        step()

    trainer.optimizer.step = spy  # type: ignore[method-assign,assignment]
    records = run(trainer)
    assert norms == [pytest.approx(1e-3, rel=1e-3)]
    assert records[0]["grad_norm"] > 1e-3  # what is logged is the norm before clipping


def test_the_frozen_target_is_neither_trained_nor_written(tmp_path: Path) -> None:
    target = tiny_target()
    before = {name: value.clone() for name, value in target.hf.state_dict().items()}
    trainer = make(tmp_path, target=target, save_every=1, max_steps=2)
    run(trainer)
    after = target.hf.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    written = trainer.checkpoints / "step-00000002/model.safetensors"
    from safetensors import safe_open

    with safe_open(written, "pt") as file:
        assert set(file.keys()) == set(trainer.drafter.state_dict())


def test_nan_stops_and_names_step_and_samples(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=3)
    windows = trainer.order.windows()
    trainer._train_window(next(windows), [], _NeverStop())  # type: ignore[arg-type]
    with torch.no_grad():
        next(trainer.drafter.parameters()).fill_(float("nan"))
    before = weights(trainer)
    window = next(windows)
    with pytest.raises(NonFiniteError, match="at step 2") as caught:
        trainer._train_window(window, [], _NeverStop())  # type: ignore[arg-type]
    assert all(sample.id in str(caught.value) for row in window.rows for sample in row)
    for name, value in weights(trainer).items():
        torch.testing.assert_close(value, before[name], equal_nan=True, rtol=0, atol=0)


def test_a_step_without_labels_is_an_error_that_names_the_samples(tmp_path: Path) -> None:
    blank = [replace(sample, spans=[]) for sample in samples(4)]
    with pytest.raises(Exception, match="no token of step 1 is supervised"):
        run(make(tmp_path, data=blank))


def test_a_micro_batch_without_labels_adds_nothing(tmp_path: Path) -> None:
    data = samples(6)
    blank = [replace(sample, id=f"blank-{sample.id}", spans=[]) for sample in samples(2, seed=9)]
    with_blank = make(tmp_path / "a", data=data + blank, batch_rows=1, accumulation=8, max_steps=3)
    without = make(tmp_path / "b", data=data, batch_rows=6, accumulation=1, max_steps=3)
    ours, theirs = run(with_blank), run(without)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=2e-4)
