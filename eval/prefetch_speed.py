"""What it gives to make batches ahead (`training.prefetch`): training from a store on disk, and from a feature server.

    python eval/prefetch_speed.py                       # the target and draft of recipes/smollm2/eagle3.yaml
    python eval/prefetch_speed.py RECIPE training.row_length=256 --steps 8 --ahead 4 --delay 0.5

The server is another process on this machine. The same steps are trained without and with batches made ahead, in
pairs that alternate in order; the first step of each run is not timed. Wants idle cores for trainer and server both:
where they share one, the server's work is hidden behind nothing. `--delay` has each forward of the server take so many
seconds longer without using a core, as the way to a server on another machine does.

Exits with 1 if the losses of a pair differ in a single bit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from store_speed import bf16_identity, documents, forget

from drafttrain.corpus.types import Sample
from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.features.building import build_store, open_store
from drafttrain.features.client import Wanted
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.server import FeatureServer
from drafttrain.features.sources import FeatureSource, StoredFeatures
from drafttrain.features.stream import StreamedFeatures
from drafttrain.losses.objective import Objective
from drafttrain.modeling.taps import FeatureSpec
from drafttrain.recipe.load import load_recipe
from drafttrain.recipe.schema import Recipe
from drafttrain.targets.load import load_target
from drafttrain.targets.model import TargetModel
from drafttrain.training.distributed import make_accelerator
from drafttrain.training.trainer import Trainer, TrainParts

TOKEN = "prefetch-speed"


@dataclass(frozen=True)
class Run:
    """Training without its first step."""

    tokens_per_s: float
    waited: float
    losses: list[float]


class Keep:
    """Keeps the records of a run."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def on_record(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def train(recipe: Recipe, target: TargetModel, samples: list[Sample], source: FeatureSource, ahead: int) -> Run:
    """The recipe's steps over these samples; the share of time that the loop waited for batches."""
    torch.manual_seed(0)
    drafter = build_drafter(recipe.drafter, target.config, None, target.device)
    init_from_target(drafter, target)
    parts = TrainParts(drafter, Objective(recipe.loss), source, samples, target.head(), ahead=ahead)
    kept = Keep()
    with tempfile.TemporaryDirectory() as folder:
        Trainer(make_accelerator(), recipe.training, parts, Path(folder), seed=0, fingerprint={}).fit([kept])
    timed = kept.records[1:]
    seconds = sum(record["seconds_per_step"] for record in timed)
    waited = seconds - sum(record["draft_s"] + record["other_s"] for record in timed)
    return Run(sum(r["tokens"] for r in timed) / seconds, waited / seconds, [r["loss"] for r in kept.records])


@contextmanager
def server(recipe: str, overrides: list[str], delay: float) -> Iterator[str]:
    """A feature server in a process of its own; its url."""
    command = [sys.executable, __file__, recipe, *overrides, "--delay", str(delay), "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise SystemExit("the server failed; its message is above")
        yield url
    finally:
        process.terminate()
        process.wait()


def serve(recipe: Recipe, delay: float) -> None:
    """Be that server, until killed."""
    target = load_target(recipe.target)
    target.prepare_for_inference()
    target.register_forward_pre_hook(lambda module, arguments: time.sleep(delay))
    found = FeatureServer(target, TOKEN)
    print(found.url, flush=True)
    found.serve()


def compare(
    name: str, run: Callable[[FeatureSource, int], Run], opened: Callable[[], FeatureSource], ahead: int, repeats: int
) -> bool:
    """Print pairs of runs; whether their losses are the same."""
    pairs: list[dict[int, Run]] = []
    for repeat in range(repeats):
        pair = {}
        for count in (0, ahead) if repeat % 2 == 0 else (ahead, 0):
            with closing(opened()) as source:
                pair[count] = run(source, count)
        pairs.append(pair)
    for count in (0, ahead):
        speeds = [pair[count].tokens_per_s for pair in pairs]
        waits = statistics.median(pair[count].waited for pair in pairs)
        print(f"{name:8} {count} ahead {statistics.median(speeds):10,.0f} tokens/s   waits {waits:5.1%} of the time")
    ratios = [pair[ahead].tokens_per_s / pair[0].tokens_per_s for pair in pairs]
    same = all(pair[ahead].losses == pair[0].losses for pair in pairs)
    print(f"{name:8} {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f}) in {repeats} pairs; "
          f"losses {'the same' if same else 'DIFFER'}", flush=True)  # fmt: skip
    return same


def main() -> int:
    """Print the table; 1 if losses differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/smollm2/eagle3.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="of a document, on average")
    parser.add_argument("--steps", type=int, default=8, help="training steps, the first of which is not timed")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ahead", type=int, default=2)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that each forward of the server is late")
    parser.add_argument("--threads", type=int, default=1, help="of the trainer")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    overrides = [*args.overrides, "training.epochs=null", f"training.max_steps={args.steps}", "training.log_every=1"]
    recipe = load_recipe(args.recipe, [*overrides, "training.save_every=null"])
    if args.serve:
        serve(recipe, args.delay)
        return 0
    target = load_target(recipe.target)
    target.prepare_for_inference()
    samples = documents(args.documents, args.tokens, target.tokenizer)
    identity = bf16_identity(recipe, target)
    spec = FeatureSpec.of(identity.taps)

    def run(source: FeatureSource, ahead: int) -> Run:
        return train(recipe, target, samples, source, ahead)

    print(f"{args.threads} thread(s) of {len(os.sched_getaffinity(0))} cores, {args.steps - 1} timed steps, "
          f"server {args.delay:g} s away")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        build_store(store, identity, target, samples, recipe.features)

        def stored() -> FeatureSource:
            forget(store)
            return StoredFeatures(open_store(store, identity, samples, "size"))

        same = compare("store", run, stored, args.ahead, args.repeats)
    with server(args.recipe, args.overrides, args.delay) as url:
        config = FeaturesConfig(source="stream", urls=(url,))

        def streamed() -> FeatureSource:
            return StreamedFeatures(config, TOKEN, Wanted(spec, target.identity, recipe.target.dtype))

        same = compare("server", run, streamed, args.ahead, args.repeats) and same
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
