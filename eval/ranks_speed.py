"""Training on two gloo ranks against one, a thread each: tokens per second, and their ratio.

    python eval/ranks_speed.py [--steps 4] [--ranks 2]

An EAGLE-3 draft of SmolLM2's width over random features: both runs train on the same rows in each optimiser step, one
rank in as many micro-batches as the other has ranks. Wants as many idle cores as ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROWS, LENGTH, HIDDEN, VOCAB = 2, 256, 576, 8192


def measure(steps: int, out: Path) -> None:
    """This rank's run; the main one writes tokens/s and seconds a step, the first step left out."""
    import numpy as np
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from drafttrain.corpus.types import Sample
    from drafttrain.drafters.build import build_drafter, init_from_target
    from drafttrain.drafters.eagle.config import Eagle3Config
    from drafttrain.features.sources import OnlineFeatures
    from drafttrain.losses.config import LossConfig
    from drafttrain.losses.objective import Objective
    from drafttrain.modeling.causal_lm import CausalLM
    from drafttrain.recipe.training_config import TrainingConfig
    from drafttrain.training.distributed import make_accelerator
    from drafttrain.training.trainer import Trainer, TrainParts

    torch.set_num_threads(1)
    ranks = int(os.environ["WORLD_SIZE"])
    most = int(os.environ["MOST_RANKS"])
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    target = CausalLM(LlamaForCausalLM(shape)).eval().requires_grad_(False)
    drafter = build_drafter(Eagle3Config(taps=(1, 2, 3), depth=4), target.config)
    init_from_target(drafter, target)
    rng = np.random.default_rng(0)
    documents = [
        Sample(f"s{i}", rng.integers(0, VOCAB, LENGTH).astype(np.int32), [(1, LENGTH - 1)])
        for i in range(ROWS * most * (steps + 1))
    ]
    parts = TrainParts(
        drafter=drafter,
        objective=Objective(LossConfig()),
        source=OnlineFeatures(target, drafter.feature_spec, batch_tokens=2048),
        samples=documents,
        target_head=target.head(),
    )
    config = TrainingConfig(
        max_steps=steps + 1,
        batch_rows=ROWS,
        accumulation=most // ranks,
        row_length=LENGTH,
        packing=False,
        precision="fp32",
        log_every=1,
        save_every=None,
    )
    records: list[dict[str, Any]] = []

    class Keep:
        def on_record(self, record: dict[str, Any]) -> None:
            records.append(record)

        def close(self) -> None:
            pass

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(make_accelerator(), config, parts, Path(folder), seed=0, fingerprint={})
        trainer.fit([Keep()])
    if records:
        seconds = sum(record["seconds_per_step"] for record in records[1:])
        tokens = sum(record["tokens"] for record in records[1:])
        out.write_text(
            json.dumps({"tokens_per_s": tokens / seconds, "s": seconds / steps, "loss": records[-1]["loss"]})
        )


def run(ranks: int, most: int, steps: int) -> dict[str, float]:
    """Start the ranks and wait for what the main one measured."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        common = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MOST_RANKS": str(most),
        }
        command = [sys.executable, __file__, "--steps", str(steps), "--worker", str(out)]
        processes = [
            subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(ranks)
        ]
        if any([process.wait() for process in processes]):
            raise SystemExit("a rank failed; its message is above")
        found: dict[str, float] = json.loads(out.read_text())
        return found


def main() -> None:
    """Measure one rank, then several, and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        measure(arguments.steps, arguments.worker)
        return
    one = run(1, arguments.ranks, arguments.steps)
    more = run(arguments.ranks, arguments.ranks, arguments.steps)
    print(f"1 rank:  {one['tokens_per_s']:8.1f} tokens/s, {one['s']:.2f} s a step, loss {one['loss']:.4f}")
    print(
        f"{arguments.ranks} ranks: {more['tokens_per_s']:8.1f} tokens/s, {more['s']:.2f} s a step, "
        f"loss {more['loss']:.4f}"
    )
    print(f"ratio:   {more['tokens_per_s'] / one['tokens_per_s']:.2f} (must reach 1.5)")


if __name__ == "__main__":
    main()
