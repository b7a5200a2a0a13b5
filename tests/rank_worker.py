"""Trains tiny drafts under every strategy in one set of ranks: `python -m tests.rank_worker JOBS OUT`, one a rank.

Importing DeepSpeed costs far more than these runs, so many jobs share a launch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

from drafttrain.training.distributed import make_accelerator
from drafttrain.training.launch import Launch
from drafttrain.training.trainer import Trainer
from tests.tiny_trainer import Recorder, tiny_config, tiny_trainer
from tests.tiny_training import Spoiled, samples, tiny_target


def make_trainer(folder: Path, launch: Launch, family: str, documents: int = 12, **values: Any) -> Trainer:
    """A trainer over `documents` random documents.

    Args:
        values: of `TrainingConfig`.
    """
    # A launch has one strategy; here many follow each other.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    config = tiny_config(**{"max_steps": 30, "lr": 3e-3, **values})
    accelerator = make_accelerator(launch, config.clip_norm)
    target = tiny_target()
    with torch.no_grad():
        # A random target knows nothing; one that is sure of something can be learnt from.
        target.head().weight.mul_(8)
    return tiny_trainer(accelerator, config, folder, family, samples(documents), target, launch=launch)


def run_job(folder: Path, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Train from the start, or from the newest checkpoint in the job's folder; the records of the main rank.

    Args:
        job: `spoil` gives names of samples and a factor for their features.
    """
    launch = Launch(*job.pop("launch"))
    spoil = job.pop("spoil", None)
    trainer = make_trainer(folder / job.pop("folder"), launch, job.pop("family"), **job)
    if spoil:
        trainer.source = Spoiled(trainer.source, *spoil)  # type: ignore[assignment]
    trainer.restore("auto")
    recorder = Recorder()
    trainer.fit([recorder])
    return recorder.records


def main() -> None:
    """Run the jobs of a JSON file and write their records."""
    jobs, out = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    results = [run_job(out.parent, job) for job in json.loads(jobs.read_text())]
    if torch.distributed.get_rank() == 0:
        out.write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
