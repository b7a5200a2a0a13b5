"""Measures the peaks of training runs' tensors: `python -m tests.memory_worker JOBS OUT`, one process a rank.

Importing DeepSpeed costs far more than these runs, so many jobs share a launch.

Tensors alone are counted, as torch's allocator reports them to the profiler, from before the target is there: what the
interpreter and libraries take is no part of a plan. What a thread of gloo lets go is not seen: it can only add, so the
least of some runs is taken. Nor is what the thread takes that makes batches ahead: that is measured apart, and added.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from torch.profiler import ProfilerActivity, profile

from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import DraftBatch
from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.lora import add_lora
from drafttrain.features.sources import FeatureSource, OnlineFeatures
from drafttrain.losses.objective import Objective
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.recipe.schema import Recipe
from drafttrain.targets.load import load_target
from drafttrain.training.ahead import batches_ahead
from drafttrain.training.distributed import make_accelerator
from drafttrain.training.launch import Launch
from drafttrain.training.sharded_target import ShardedTarget, TogetherFeatures, load_sharded_target
from drafttrain.training.trainer import Trainer, TrainParts


def peak_of(profiler: profile) -> int:
    """Bytes at the highest point of what the profiler saw allocated and freed."""
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    total = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        highest = max(highest, total)
    return highest


def train(recipe: Recipe, launch: Launch, folder: Path) -> Callable[[], DraftBatch]:
    """Two optimiser steps of full rows, as a run makes them; returns what makes one more micro-batch."""
    training = recipe.training
    accelerator = make_accelerator(launch, training.clip_norm)
    target = (load_sharded_target if recipe.target.placement == "zero3" else load_target)(recipe.target)
    target.prepare_for_inference()
    size = getattr(recipe.drafter, "draft_vocab_size", None)
    vocab_map = VocabMap.from_ids(range(size), target.vocab_size) if size else None
    drafter = build_drafter(recipe.drafter, target.config, vocab_map, target.device)
    init_from_target(drafter, target)
    if getattr(recipe.drafter, "lora", None):
        add_lora(drafter, recipe.drafter.lora)
    rng, length = np.random.default_rng(0), training.row_length
    # Every token is a label that the draft can say: the most that a row can ask for.
    most = size or target.vocab_size
    count = 2 * training.batch_rows * training.accumulation * accelerator.num_processes
    documents = [
        Sample(f"s{i}", rng.integers(0, most, length).astype(np.int32), [(0, length - 1)]) for i in range(count)
    ]
    source: FeatureSource = _Sayable(
        OnlineFeatures(
            target, drafter.feature_spec, batch_tokens=recipe.features.batch_tokens, want_top1=size is not None
        )
    )
    if isinstance(target, ShardedTarget):
        source = TogetherFeatures(source, target)
    parts = TrainParts(
        drafter, Objective(recipe.loss), source, documents, target.head(), ahead=batches_ahead(recipe, on_cpu=True)
    )
    Trainer(accelerator, training, parts, folder, seed=0, fingerprint={}, launch=launch).fit()
    return partial(source.batch, [[document] for document in documents[: training.batch_rows]], target.device)


class _Sayable:
    """A source whose target always says what a draft of a small vocabulary can say."""

    def __init__(self, source: FeatureSource) -> None:
        self.source, self.target_s = source, 0.0

    def batch(self, rows: Any, device: torch.device) -> Any:
        batch = self.source.batch(rows, device)
        if batch.top1 is not None:
            batch.top1 = torch.ones_like(batch.tokens)
        return batch

    def close(self) -> None:
        self.source.close()


def measure(job: dict[str, Any]) -> int:
    """The peak of a job's runs: `recipe` as a mapping, `launch` as (kind, stage), `runs` their number."""
    return min(measured_run(job) for _ in range(job["runs"]))


def measured_run(job: dict[str, Any]) -> int:
    """The peak of one run."""
    # A launch has one strategy; here many follow each other.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    gc.collect()
    recipe = Recipe.model_validate(job["recipe"], strict=False)
    with tempfile.TemporaryDirectory() as folder, watched() as profiler:
        make_batch = train(recipe, Launch(*job["launch"]), Path(folder))
    peak = peak_of(profiler)
    if ahead := batches_ahead(recipe, on_cpu=True):
        # At the height of a step: the batch that is trained on, those that are ready, and one in the making.
        with watched() as profiler:
            batch = make_batch()
        peak += peak_of(profiler) + ahead * sum(tensor.nbytes for tensor in batch.tensors())
    return peak


def watched() -> profile:
    """What counts allocations of the thread that enters it."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def main() -> None:
    """Run the jobs of a JSON file and write what the main rank measured."""
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.set_num_threads(1)
    peaks = [measure(job) for job in jobs]
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        out.write_text(json.dumps(peaks))


if __name__ == "__main__":
    main()
