"""How a draft is trained, measured while training, and tracked."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from drafttrain.config import Config


class GuardConfig(Config):
    """What becomes of a step that would do harm. A dropped step changes nothing, and its data is not seen again.

    Attributes:
        non_finite: loss or gradient is NaN or infinite: "stop" the run, "skip" the step, or "rollback": skip it, and
            go on with the weights and moments of the newest whole checkpoint.
        spike: the same for a loss above `spike_factor` times the median of the last `window` steps.
        limit: steps skipped in a row, or rollbacks to one checkpoint, before the run stops after all.
    """

    non_finite: Literal["stop", "skip", "rollback"] = "stop"
    spike: Literal["off", "stop", "skip", "rollback"] = "off"
    spike_factor: float = Field(4.0, gt=1)
    window: int = Field(50, ge=2)
    limit: int = Field(3, ge=1)

    @property
    def rolls_back(self) -> bool:
        """Whether checkpoints are needed."""
        return "rollback" in (self.non_finite, self.spike)


class TrainingConfig(Config):
    """The optimisation of one run.

    A *row* is what the model sees as one sequence: several packed samples or one padded sample. One optimiser
    step sees `batch_rows * accumulation * ranks` rows.

    Attributes:
        epochs: passes over the training samples; may be fractional.
        max_steps: optimiser steps. Exactly one of `epochs` and `max_steps` is given.
        batch_rows: rows of a micro-batch on each rank.
        row_length: tokens of a packed row; the longest padded row.
        accumulation: micro-batches of one optimiser step.
        lr: peak learning rate.
        min_lr: learning rate at the end of the decay.
        weight_decay: AdamW's decoupled decay, on matrices only.
        betas: AdamW's.
        schedule: "wsd" (warm-up, stable, linear decay over the last `decay_fraction`), "cosine", "constant".
        warmup: below 1 a share of all steps, from 1 on a number of steps.
        decay_fraction: share of all steps over which "wsd" decays.
        clip_norm: largest global gradient norm, None for no clipping.
        precision: "bf16" is autocast over fp32 master weights. "auto" takes it where the device computes in bfloat16,
            as `target.dtype` does.
        gradient_checkpointing: recompute the draft's layers in the backward.
        compile: have `torch.compile` fuse what lies between the draft's attentions; the first steps take longer.
        prefetch: micro-batches made ready while others are trained on, each with its features in memory; 0 for none.
            None takes 2 where features are read or received, 1 where the target runs beside the draft on a GPU, and
            none where the two share a CPU or the target lies in shards.
        seed: order of samples, initialisation and noise; None takes the recipe's.
        log_every, save_every: in optimiser steps; `save_every: null` saves at the end of the run only.
        keep: checkpoints kept beside the best one.
        shuffle_block: samples that stay neighbours in the order of an epoch, so that a store larger than memory is
            read in runs; None shuffles freely.
        packing: put several samples in one row, each attending to itself alone.
        num_threads: CPU threads of torch, None for its own choice.
        patience_s: seconds without progress in training after which a run of several ranks is ended with the name of
            the rank that hangs; a measurement or a checkpoint must not take longer, data and features may. None waits
            for ever.
        guard: what becomes of steps with a NaN, or with a loss far above the last ones.
    """

    epochs: float | None = Field(None, gt=0)
    max_steps: int | None = Field(None, ge=1)
    batch_rows: int = Field(4, ge=1)
    row_length: int = Field(1024, ge=2)
    accumulation: int = Field(1, ge=1)
    lr: float = Field(3e-4, gt=0)
    min_lr: float = Field(0.0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    schedule: Literal["wsd", "cosine", "constant"] = "cosine"
    warmup: float = Field(0.02, ge=0)
    decay_fraction: float = Field(0.2, gt=0, le=1)
    clip_norm: float | None = Field(1.0, gt=0)
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    gradient_checkpointing: bool = False
    compile: bool = False
    prefetch: int | None = Field(None, ge=0, le=64)
    seed: int | None = Field(None, ge=0)
    log_every: int = Field(10, ge=1)
    save_every: int | None = Field(500, ge=1)
    keep: int = Field(2, ge=1)
    shuffle_block: int | None = Field(None, ge=1)
    packing: bool = True
    num_threads: int | None = Field(None, ge=1)
    patience_s: float | None = Field(3600.0, gt=0)
    guard: GuardConfig = GuardConfig()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        problems = []
        if (self.epochs is None) == (self.max_steps is None):
            problems.append("give one of `epochs` and `max_steps`, and leave the other out or null")
        if self.min_lr > self.lr:
            problems.append(f"min_lr {self.min_lr:g} is above lr {self.lr:g}")
        if not all(0 <= beta < 1 for beta in self.betas):
            problems.append(f"betas {self.betas} must lie in [0, 1)")
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            problems.append(f"warmup {self.warmup:g} is neither a share below 1 nor a whole number of steps")
        if self.max_steps is not None and self.warmup >= 1 and self.warmup >= self.max_steps:
            problems.append(f"warmup of {self.warmup:g} steps leaves nothing of max_steps {self.max_steps}")
        if self.schedule == "wsd" and self.warmup < 1 and self.warmup + self.decay_fraction > 1:
            together = f"warmup {self.warmup:g} and decay_fraction {self.decay_fraction:g}"
            problems.append(f"{together} are more than the whole run")
        if self.guard.rolls_back and self.save_every is None:
            problems.append("guard: a rollback needs checkpoints to go back to: set save_every")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def warmup_steps(self, total_steps: int) -> int:
        """Warm-up in optimiser steps for a run of `total_steps`."""
        return int(self.warmup) if self.warmup >= 1 else round(self.warmup * total_steps)

    def decay_steps(self, total_steps: int) -> int:
        """Length of the decay of "wsd" in optimiser steps."""
        return min(round(self.decay_fraction * total_steps), total_steps - self.warmup_steps(total_steps))


class EvaluationConfig(Config):
    """Acceptance measured in the engine on held-out prompts while training.

    Attributes:
        every: optimiser steps between measurements; None measures at the end of the run only.
        prompts: held-out prompts used, 0 to measure nothing.
        k: draft tokens of a round.
        max_new_tokens: longest answer.
        batch_size: requests decoded together.
    """

    every: int | None = Field(None, ge=1)
    prompts: int = Field(16, ge=0)
    k: int = Field(4, ge=1)
    max_new_tokens: int = Field(128, ge=1)
    batch_size: int = Field(8, ge=1)


class TrackingConfig(Config):
    """Where metrics go beside `metrics.jsonl`: wandb, offline unless asked."""

    wandb: Literal["off", "offline", "online"] = "off"
    project: str = Field("drafttrain", min_length=1)
