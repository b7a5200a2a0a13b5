"""The training loop. It knows no draft family, no feature source and no model: it is handed them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, tee
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import Drafter
from drafttrain.errors import AlreadyReported, CheckpointError, DataError, UserError
from drafttrain.features.layout import lay_out
from drafttrain.features.prefetch import Batches, InTurn, Prefetcher
from drafttrain.features.sources import FeatureSource, WaitingSource
from drafttrain.losses.objective import Objective, ObjectiveOutput
from drafttrain.modeling.head import Head
from drafttrain.recipe.schema import CHECKPOINTS
from drafttrain.recipe.training_config import TrainingConfig
from drafttrain.training.callbacks import Acceptance, Listener, MeasureAcceptance
from drafttrain.training.checkpoint import (
    TrainState,
    load_checkpoint,
    newest_whole,
    save_checkpoint,
    set_aside,
    set_later_aside,
)
from drafttrain.training.distributed import from_main, sum_over_ranks
from drafttrain.training.guard import LossGuard, Trouble
from drafttrain.training.heartbeat import Heartbeat
from drafttrain.training.interval import Interval
from drafttrain.training.launch import Launch
from drafttrain.training.schedule import learning_rate, require_rest_of_warmup
from drafttrain.training.signals import StopRequest
from drafttrain.training.step import TrainStep
from drafttrain.training.strategies.base import Whole, kept_tensors
from drafttrain.training.strategies.choose import make_strategy
from drafttrain.training.windows import DataOrder, Row, Window

Resume = Literal["auto", "never"] | Path
OnBest = Callable[[Whole], None]


class NonFiniteError(UserError):
    """Loss or gradient is NaN or infinite; the message names the step and the samples."""


class LossSpikeError(UserError):
    """The loss is far above the last ones; the message names the step and the samples."""


@dataclass
class TrainParts:
    """What a run trains with.

    Attributes:
        drafter: bound to the target, on any device.
        objective: weighted terms.
        source: gives batches with features.
        samples: training set.
        target_head: frozen.
        target_in_shards: ranks run the target together, so they measure together.
        ahead: micro-batches made ready ahead; none where ranks run the target together.
    """

    drafter: Drafter
    objective: Objective
    source: FeatureSource
    samples: Sequence[Sample]
    target_head: Head
    target_in_shards: bool = False
    ahead: int = 0


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        state: the last training state.
        finished: False when a signal stopped the run; it was saved and can be resumed.
    """

    state: TrainState
    finished: bool


class Trainer:
    """Trains a draft; resumable at any step.

    Args:
        accelerator: of `make_accelerator`.
        config: optimisation.
        parts: what is trained, and on what.
        folder: `checkpoints/` is kept here.
        seed: order of samples and noise.
        fingerprint: JSON values that a checkpoint must share to be resumed (data, target, draft).
        launch: how the draft is sharded over ranks; default: not at all.
        life: is told where the run stands.
        warn: shows a warning.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        config: TrainingConfig,
        parts: TrainParts,
        folder: Path,
        *,
        seed: int,
        fingerprint: dict[str, Any],
        launch: Launch | None = None,
        life: Heartbeat | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.accelerator, self.config, self.seed, self.warn = accelerator, config, seed, warn
        self.checkpoints = folder / CHECKPOINTS
        self._life = life
        self.device = accelerator.device
        self.drafter = parts.drafter.to(self.device)
        self.drafter.gradient_checkpointing = config.gradient_checkpointing
        if config.compile:
            self.drafter.compile_training()
        self.source = parts.source
        self.objective = parts.objective
        self.measure_together = parts.target_in_shards
        self.ahead = 0 if parts.target_in_shards else parts.ahead
        self._batches: Batches = InTurn(parts.source, self.device)
        self.ranks, self.rank = accelerator.num_processes, accelerator.process_index
        self.order = DataOrder(
            parts.samples,
            row_length=config.row_length,
            packing=config.packing,
            window_rows=config.batch_rows * config.accumulation * self.ranks,
            seed=seed,
            shuffle_block=config.shuffle_block,
        )
        self.fingerprint = {**fingerprint, **order_of(config, seed), "samples": len(parts.samples)}
        self.total_steps = config.max_steps or self.order.steps_in(config.epochs or 0.0)
        require_rest_of_warmup(config, self.total_steps)
        self.depths = parts.drafter.max_depth
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        vocab_map = self.drafter.vocab_map.to(self.device)
        step = TrainStep(self.drafter, parts.objective, parts.target_head, vocab_map, dtype)
        # Names and shapes as they are before anything is sharded.
        self.trained = {name: tensor.shape for name, tensor in kept_tensors(self.drafter).items()}
        optimizer = make_optimizer(self.drafter, config, self.device)
        self.strategy = make_strategy(launch, accelerator, step, optimizer)
        self.optimizer = self.strategy.optimizer
        self.state = TrainState()
        self.guard = LossGuard(config.guard)
        self._interval = Interval.empty(self.depths)
        self._saved_step: int | None = None

    def _at(self, stage: str, order: int) -> None:
        if self._life is not None:
            self._life.at(self.state.step, order, stage)

    def restore(self, resume: Resume) -> None:
        """Find the checkpoint to go on from and load it on every rank. "never" sets an earlier run aside."""
        main = self.accelerator.is_main_process
        if resume == "never":
            path = None
            if main:
                set_aside(self.checkpoints)
        elif resume == "auto":
            path = from_main(newest_whole(self.checkpoints, self.warn) if main else None)
        else:
            path = resume
        self.accelerator.wait_for_everyone()
        if path is not None:
            state, snapshot = load_checkpoint(path, self.trained, self.fingerprint)
            self._same_step_size(path, state)
            self.strategy.load(snapshot)
            self.state = state
            self.guard.load(state.guard)
            self._interval = Interval.from_json(self.state.interval, self.depths)
            if not main:
                self._interval.clear_share()
            if path.parent == self.checkpoints:
                self._saved_step = state.step

    def _same_step_size(self, path: Path, state: TrainState) -> None:
        """Refuse to go on with steps of another size: the curve would not be that of an unbroken run."""
        rows, here = state.rows_per_step, self.order.window_rows
        if rows is None or rows == here:
            return
        each = self.config.batch_rows * self.ranks
        fits = rows % each == 0
        raise CheckpointError(
            f"a step had {rows} rows; here it has {here} ({self.ranks} ranks x training.batch_rows "
            f"{self.config.batch_rows} x training.accumulation {self.config.accumulation})",
            where=path,
            remedy=f"set training.accumulation={rows // each}"
            if fits
            else f"{rows} must be a multiple of ranks x training.batch_rows: change one of these two",
        )

    def fit(
        self,
        listeners: Sequence[Listener] = (),
        *,
        measure: MeasureAcceptance | None = None,
        measure_every: int | None = None,
        on_best: OnBest = lambda whole: None,
    ) -> TrainResult:
        """Train to the end, or until SIGTERM or SIGINT. Checkpoints behind the step that it goes on from are set aside.

        Args:
            listeners: get the records, on the main rank.
            measure: acceptance of the draft as it stands, called on the main rank.
            measure_every: steps between measurements, beside the one at the end; None measures at the end alone.
            on_best: called on the main rank with the whole draft when a measurement is the best so far.

        Raises:
            NonFiniteError: NaN or infinity in loss or gradient, as far as the guard does not drop such steps; the
                draft is as it was before that step.
            LossSpikeError: the same for a loss far above the last ones.
            DataError: no supervised label in a whole step.
        """
        if self.accelerator.is_main_process and (given_up := set_later_aside(self.checkpoints, self.state.step)):
            self.warn(f"checkpoints behind step {self.state.step} are set aside: {', '.join(p.name for p in given_up)}")
        finished = True
        source = self.source
        with StopRequest(source.give_up if isinstance(source, WaitingSource) else lambda: None) as stop:
            try:
                if self.guard.rolls_back and self._saved_step is None:
                    self._save()
                windows, batches = self._feed()
                with closing(batches) as self._batches:
                    for window in windows:
                        if not self._train_window(window, listeners, stop):
                            finished = False
                            break
                        done = self.state.step
                        last = done == self.total_steps
                        if measure is not None and (last or (measure_every is not None and done % measure_every == 0)):
                            self._measure(measure, listeners, on_best)
                        if last or (self.config.save_every is not None and done % self.config.save_every == 0):
                            self._save()
                if not finished and self._saved_step != self.state.step:
                    self._save()
            finally:
                for listener in listeners:
                    listener.close()
        return TrainResult(self.state, finished)

    def _feed(self) -> tuple[Iterator[Window], Batches]:
        """The steps that are left, and what makes their batches."""
        left = max(0, self.total_steps - self.state.step)
        windows: Iterator[Window] = islice(self.order.windows(self.state.epoch, self.state.row), left)
        if not self.ahead:
            return windows, InTurn(self.source, self.device)
        windows, coming = tee(windows)
        order = (rows for window in coming for rows in self._micro_batches(window))
        return windows, Prefetcher(self.source, self.device, self.ahead, order)

    def _micro_batches(self, window: Window) -> list[list[Row]]:
        return window.micro_batches(self.rank, self.ranks, self.config.batch_rows)

    def _train_window(self, window: Window, listeners: Sequence[Listener], stop: StopRequest) -> bool:
        """One optimiser step; False, with nothing changed, when some rank was asked to stop."""
        began = time.perf_counter()
        micro = self._micro_batches(window)
        counts, asked_to_stop = self._agree(micro, stop)
        if asked_to_stop:
            return False
        if not bool(counts[0] > 0):
            self._raise_on_all(
                DataError(
                    f"no token of step {self.state.step + 1} is supervised",
                    where=f"samples {_names(window.rows)}",
                    remedy="look at the loss mask with `drafttrain inspect`",
                )
            )
        made = self._gradients(micro, counts)
        if made is None:
            return False
        outputs, losses, loss = made
        self._at("update", 2 * len(micro))
        rate = learning_rate(self.state.step, self.total_steps, self.config)
        trouble, norm = self._update(loss, rate)
        if trouble is not None:
            self._drop(trouble, loss, losses, micro, window, listeners)
        state = self.state
        state.rows_per_step = self.order.window_rows
        state.step += 1
        state.epoch, state.row = window.epoch, window.first_row + len(window.rows)
        if trouble is None:
            self.guard.taken(loss)
            tokens = sum(len(sample.ids) for row in window.rows for sample in row)
            state.tokens += tokens
            for output in outputs:
                self._interval.correct += output.correct.detach().cpu()
                self._interval.total += output.total.detach().cpu()
            self._interval.end_step(float(losses.sum()), tokens, norm, time.perf_counter() - began)
        else:
            self._interval.drop_step(time.perf_counter() - began)
        if state.step % self.config.log_every == 0 or state.step == self.total_steps:
            self._log(rate, listeners)
        return True

    def _gradients(self, micro: list[list[Row]], counts: Tensor) -> tuple[list[ObjectiveOutput], Tensor, float] | None:
        """Forward and backward of a window.

        Returns:
            what came of each micro-batch, its loss [N], float64, and the loss of the step over all ranks. None, with
            nothing changed, when some rank was told to stop while it waited for features: the step is made after the
            resume.
        """
        seconds = dict(self._interval.seconds)
        steps = [
            self._micro_step(index, rows, counts, last=index == len(micro) - 1) for index, rows in enumerate(micro)
        ]
        losses = torch.stack([output.loss.detach() for output, _ in steps]).double().cpu()
        blank = losses.new_tensor(any(gave_up for _, gave_up in steps))
        loss, blanks = self._over_ranks(torch.stack([losses.sum(), blank])).tolist()
        if blanks:
            self.strategy.drop()
            self._interval.seconds = seconds
            return None
        return [output for output, _ in steps], losses, loss

    def _update(self, loss: float, rate: float) -> tuple[Trouble | None, float]:
        """The optimiser's step, if the guard has nothing against it; what it has, and the norm before clipping."""
        trouble = self.guard.of_loss(loss)
        if trouble is not None:
            self.strategy.drop()
            return trouble, 0.0
        norm = self.strategy.update(rate, self.config.clip_norm)
        return self.guard.of_norm(norm), norm

    def _over_ranks(self, value: Tensor) -> Tensor:
        return sum_over_ranks(self.accelerator, value) if self.ranks > 1 else value

    def _agree(self, micro: list[list[Row]], stop: StopRequest) -> tuple[Tensor, bool]:
        """Labels a depth [K] in the whole window over all ranks, and whether a rank was told to stop."""
        local = torch.zeros(self.depths + 1, dtype=torch.float64)
        for rows in micro:
            local[:-1] += self.objective.counts(lay_out(rows), self.depths).cpu()
        local[-1] = float(stop.asked)
        total = self._over_ranks(local)
        return total[:-1], bool(total[-1] > 0)

    def _micro_step(self, index: int, rows: list[Row], counts: Tensor, last: bool) -> tuple[ObjectiveOutput, bool]:
        """Forward and backward of a micro-batch; ranks exchange gradients in the last one alone.

        Returns:
            its output, and whether its features could not be had.
        """
        self._at(f"features of micro-batch {index}", 2 * index)
        began = time.perf_counter()
        ready = self._batches.take(rows)
        featured = time.perf_counter()
        self._at(f"draft on micro-batch {index}", 2 * index + 1)
        seed = np.random.SeedSequence([self.seed, self.state.step, self.rank, index])
        torch.manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
        output = self.strategy.micro_step(ready.batch, counts, last)
        self._interval.end_wait(featured - began, ready.target_s, self._batches.ahead)
        self._interval.seconds["draft"] += time.perf_counter() - featured
        return output, ready.gave_up

    def _drop(
        self,
        trouble: Trouble,
        loss: float,
        losses: Tensor,
        micro: list[list[Row]],
        window: Window,
        listeners: Sequence[Listener],
    ) -> None:
        """Do about a step what the guard says; the gradients are gone already."""
        action, spent = self.guard.decide(trouble)
        if action == "stop":
            self._stop(trouble, spent, losses.tolist(), micro)
        back = self._roll_back() if action == "rollback" else None
        record = {
            "kind": "guard",
            "step": self.state.step + 1,
            "what": trouble.what,
            "action": action,
            "to_step": back,
            "loss": loss if np.isfinite(loss) else None,
            "dropped": self.guard.dropped,
            "samples": _names(window.rows),
        }
        for listener in listeners:
            listener.on_record(record)

    def _roll_back(self) -> int:
        """Put the draft and the optimiser of the newest whole checkpoint back; its step."""
        main = self.accelerator.is_main_process
        self._at("rolling back", 0)
        path = from_main(newest_whole(self.checkpoints, self.warn, self.state.step) if main else None)
        if path is None:
            self._raise_on_all(
                CheckpointError(
                    "there is no whole checkpoint to roll back to",
                    where=self.checkpoints,
                    remedy="set training.guard to skip, or start again with --resume never",
                )
            )
        saved, snapshot = load_checkpoint(path, self.trained, self.fingerprint)
        self.strategy.load(snapshot)
        self.guard.recall(saved.guard)
        return saved.step

    def _stop(self, trouble: Trouble, spent: str, losses: list[float], micro: list[list[Row]]) -> NoReturn:
        bad = [rows for rows, loss in zip(micro, losses, strict=True) if not np.isfinite(loss)]
        rows = [row for group in bad or micro for row in group]
        error = (LossSpikeError if trouble.kind == "spike" else NonFiniteError)(
            f"{trouble.what} at step {self.state.step + 1}{spent}",
            where=f"rank {self.rank}, samples {_names(rows)}",
            remedy="lower training.lr, or remove the samples named here; the last checkpoint is intact",
        )
        if trouble.kind != "loss":
            self._raise_on_all(error)
        # The ranks whose own loss it is name their samples.
        raise error if bad else AlreadyReported(error.what)

    def _raise_on_all(self, error: UserError) -> NoReturn:
        """Raise what every rank sees at this moment; one of them shows it."""
        raise error if self.accelerator.is_main_process else AlreadyReported(error.what)

    def _log(self, rate: float, listeners: Sequence[Listener]) -> None:
        if not self._interval.steps:
            return  # all were dropped: their count stands in the next line
        record = self._interval.record(self.accelerator)
        self._interval = Interval.empty(self.depths)
        if not self.accelerator.is_main_process:
            return
        record = {"kind": "train", "step": self.state.step, "epoch": self.state.epoch, "lr": rate, **record}
        for listener in listeners:
            listener.on_record(record)

    def _measure(self, measure: MeasureAcceptance, listeners: Sequence[Listener], on_best: OnBest) -> None:
        main = self.accelerator.is_main_process
        self._at("features ahead of the measurement", 0)
        with self._batches.still():
            self._at("measuring", 1)
            whole = self.strategy.whole(main or self.measure_together)
            if whole is not None:
                found = measure(whole.drafter)
                if main:
                    self._record_measurement(found, whole, listeners, on_best)
        self._at("waiting for the measurement", 2)
        self.accelerator.wait_for_everyone()

    def _record_measurement(
        self, found: Acceptance, whole: Whole, listeners: Sequence[Listener], on_best: OnBest
    ) -> None:
        best = self.state.best_tau is None or found.tau > self.state.best_tau
        if best:
            self.state.best_tau, self.state.best_step = found.tau, self.state.step
            on_best(whole)
        record = {
            "kind": "eval",
            "step": self.state.step,
            "tau": found.tau,
            "alpha": found.alpha,
            "k": found.k,
            "rounds": found.rounds,
            "seconds": found.seconds,
            "best": best,
        }
        for listener in listeners:
            listener.on_record(record)

    def _save(self) -> None:
        self._at("saving", 0)
        self._interval.gather(self.accelerator)
        self.guard.saved()
        snapshot = self.strategy.snapshot(self.accelerator.is_main_process)
        if snapshot is not None:
            self.state.interval, self.state.guard = self._interval.to_json(), self.guard.to_json()
            save_checkpoint(self.checkpoints, self.state, snapshot, self.trained, self.fingerprint, self.config.keep)
        self._saved_step = self.state.step
        self._at("waiting for the checkpoint", 1)
        self.accelerator.wait_for_everyone()


def order_of(config: TrainingConfig, seed: int) -> dict[str, Any]:
    """What decides, with the data, which tokens a step sees: a run goes on with the same alone."""
    return {
        "seed": seed,
        "packing": config.packing,
        "row_length": config.row_length,
        "shuffle_block": config.shuffle_block,
    }


def make_optimizer(drafter: Drafter, config: TrainingConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; decay on matrices only."""
    trainable = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        fused=device.type in ("cpu", "cuda"),
    )


def _names(rows: Sequence[Row], limit: int = 8) -> str:
    names = [sample.id for row in rows for sample in row]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
