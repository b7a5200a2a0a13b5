"""Sums between two lines of the metrics log. They travel in checkpoints, so that a resumed run logs the same lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from drafttrain.training.distributed import sum_over_ranks
from drafttrain.training.metrics import peak_memory_mib

_SECONDS = ("all", "draft", "waits", "data", "target")


@dataclass
class Interval:
    """This rank's sums.

    Attributes:
        correct, total: [K] labels hit and seen at each depth.
        loss: sum of step losses (this rank's share of them).
        steps, tokens: optimiser steps, and tokens of all ranks.
        grad_norm: sum of the norms before clipping.
        dropped: steps that were not taken; they are in none of the sums but the seconds.
        seconds: wall time of everything; of the draft; of waiting for batches, and of that without the target's time
            where it ran meanwhile ("data"); and the target's own, which batches that are made ahead take beside it all.
    """

    correct: Tensor
    total: Tensor
    loss: float = 0.0
    steps: int = 0
    tokens: int = 0
    grad_norm: float = 0.0
    dropped: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SECONDS, 0.0))

    @staticmethod
    def empty(depths: int) -> Interval:
        """Nothing summed yet."""
        return Interval(torch.zeros(depths, dtype=torch.float64), torch.zeros(depths, dtype=torch.float64))

    def end_wait(self, seconds: float, target_s: float, ahead: bool) -> None:
        """Count the wait for a batch; the target's share of it, unless the batch was made ahead."""
        self.seconds["waits"] += seconds
        self.seconds["data"] += seconds if ahead else seconds - target_s
        self.seconds["target"] += target_s

    def end_step(self, loss: float, tokens: int, grad_norm: float, seconds: float) -> None:
        """Count an optimiser step."""
        self.loss += loss
        self.steps += 1
        self.tokens += tokens
        self.grad_norm += grad_norm
        self.seconds["all"] += seconds

    def drop_step(self, seconds: float) -> None:
        """Count a step that was not taken."""
        self.dropped += 1
        self.seconds["all"] += seconds

    def gather(self, accelerator: Accelerator) -> None:
        """Move the sums of all ranks to the main one; every rank must call it."""
        if accelerator.num_processes == 1:
            return
        local = torch.cat([torch.tensor([self.loss], dtype=torch.float64), self.correct, self.total])
        summed = sum_over_ranks(accelerator, local)
        if accelerator.is_main_process:
            self.loss = float(summed[0])
            self.correct, self.total = summed[1:].chunk(2)
        else:
            self.clear_share()

    def clear_share(self) -> None:
        """Drop what another rank has taken over."""
        self.loss = 0.0
        self.correct, self.total = torch.zeros_like(self.correct), torch.zeros_like(self.total)

    def record(self, accelerator: Accelerator) -> dict[str, Any]:
        """The metrics of the interval, right on the main rank; every rank must call it, after a step was taken."""
        self.gather(accelerator)
        accuracy = [
            hit / seen if seen else None for hit, seen in zip(self.correct.tolist(), self.total.tolist(), strict=True)
        ]
        seconds = self.seconds["all"]
        inside = self.seconds["waits"] + self.seconds["draft"]
        return {
            "loss": self.loss / self.steps,
            "accuracy": accuracy,
            "grad_norm": self.grad_norm / self.steps,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens / seconds if seconds else 0.0,
            "seconds_per_step": seconds / (self.steps + self.dropped),
            "dropped": self.dropped,
            "data_s": self.seconds["data"],
            "target_s": self.seconds["target"],
            "draft_s": self.seconds["draft"],
            "other_s": seconds - inside,
            "memory_mib": peak_memory_mib(accelerator.device),
        }

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "correct": self.correct.tolist(),
            "total": self.total.tolist(),
            "loss": self.loss,
            "steps": self.steps,
            "tokens": self.tokens,
            "grad_norm": self.grad_norm,
            "dropped": self.dropped,
            "seconds": self.seconds,
        }

    @staticmethod
    def from_json(value: dict[str, Any], depths: int) -> Interval:
        """Inverse of `to_json`; empty for an empty dict."""
        if not value:
            return Interval.empty(depths)
        tensors = {key: torch.tensor(value[key], dtype=torch.float64) for key in ("correct", "total")}
        seconds = value["seconds"]
        # Checkpoints of before batches were made ahead.
        seconds.setdefault("waits", seconds["data"] + seconds["target"])
        return Interval(**{**value, **tensors})
