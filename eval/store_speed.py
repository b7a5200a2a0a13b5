"""How much faster a feature store is read than training consumes it, and what fp8 takes beside bf16.

    python eval/store_speed.py                       # the target and draft of recipes/smollm2/eagle3.yaml
    python eval/store_speed.py RECIPE training.shuffle_block=8 --documents 64 --workers 2

The target runs once over documents made of the prompts that ship, into a bf16 store, which is copied to fp8. Then an
epoch of each is read into training batches, first from disk (the kernel's copy of the files is dropped) and then from
memory, in the order and rows of the recipe, and the draft is trained on some of the same batches: forward, backward
and optimiser step.
Exits with 1 if reading either from disk gives less than 5 times the tokens that training takes in the same time, or if
fp8 takes more than 0.52 of the bytes of bf16.

That fp8 moves tau by less than 0.03 is measured by training twice on the same answers (hours on two cores):

    drafttrain train RECIPE name=with-bf16 features.source=offline features.dtype=bf16
    drafttrain features convert runs/with-bf16/features runs/fp8 --dtype fp8
    SAME="data.prompts=[] data.path=runs/with-bf16/data/answers.jsonl"
    drafttrain train RECIPE name=with-fp8 features.source=offline features.dtype=fp8 features.path=runs/fp8 $SAME
    drafttrain eval runs/with-bf16 --suite eval/suites/core.yaml
    drafttrain eval runs/with-fp8 --suite eval/suites/core.yaml
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafttrain.corpus.config import PromptSource
from drafttrain.corpus.readers import read_prompts
from drafttrain.corpus.types import Sample
from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.features.building import build_store, convert_store, difference, identity_of, open_store
from drafttrain.features.reader import StoreReader
from drafttrain.features.sources import StoredFeatures
from drafttrain.features.store import StoreIdentity
from drafttrain.losses.objective import Objective
from drafttrain.modeling.taps import Tap
from drafttrain.recipe.load import load_recipe
from drafttrain.recipe.schema import Recipe
from drafttrain.targets.load import load_target
from drafttrain.targets.model import TargetModel
from drafttrain.training.step import TrainStep
from drafttrain.training.trainer import make_optimizer
from drafttrain.training.windows import DataOrder, Row

CPU = torch.device("cpu")
LEAST_RATIO, MOST_BYTES = 5.0, 0.52


@dataclass(frozen=True)
class Reading:
    """Tokens a second of one epoch."""

    from_disk: float
    from_memory: float
    bytes_per_token: float


def documents(count: int, tokens: int, tokenizer: Any) -> list[Sample]:
    """The prompts that ship, one after the other, cut into `tokens` a document on average; the second half of each
    is supervised."""
    rng = np.random.default_rng(0)
    made: list[Sample] = []
    ids: list[int] = []
    wanted = 0
    for prompt in read_prompts(PromptSource(source="data/prompts/train.jsonl")).items:
        if not wanted:
            wanted = int(rng.integers(tokens // 2, tokens * 3 // 2))
        ids += tokenizer(prompt.messages[-1]["content"] + "\n")["input_ids"]
        if len(ids) >= wanted:
            made.append(Sample(f"d{len(made)}", np.array(ids[:wanted], np.int32), [(wanted // 2, wanted - 1)]))
            ids, wanted = [], 0
            if len(made) == count:
                return made
    raise SystemExit(f"the prompts that ship make {len(made)} documents only")


def bf16_identity(recipe: Recipe, target: TargetModel) -> StoreIdentity:
    """What a bf16 store is made for that serves the recipe's draft."""
    spec = build_drafter(recipe.drafter, target.config, device="meta").feature_spec
    return identity_of(target.identity, spec, dtype="bfloat16", compute_dtype=recipe.target.dtype)


def micro_batches(recipe: Recipe, samples: list[Sample]) -> list[list[Row]]:
    """An epoch as a single rank runs it."""
    training = recipe.training
    order = DataOrder(
        samples,
        row_length=training.row_length,
        packing=training.packing,
        window_rows=training.batch_rows,
        seed=0,
        shuffle_block=training.shuffle_block,
    )
    rows = [[samples[index] for index in row] for row in order.epoch_rows(0)]
    return [rows[at : at + training.batch_rows] for at in range(0, len(rows), training.batch_rows)]


def forget(path: Path) -> None:
    """Drop the kernel's copy of a store's files."""
    for file in path.rglob("*.bin"):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def read(path: Path, identity: StoreIdentity, samples: list[Sample], batches: list[list[Row]], workers: int) -> Reading:
    """Read an epoch twice; opening the store and checking its tokens is not counted."""
    seconds = []
    tokens = sum(len(sample.ids) for sample in samples)
    source = StoredFeatures(open_store(path, identity, samples, "size"), workers)
    forget(path)
    for _ in range(2):
        began = time.perf_counter()
        for rows in batches:
            source.batch(rows, CPU)
        seconds.append(time.perf_counter() - began)
    source.close()
    size = sum(file.stat().st_size for file in path.rglob("*.bin"))
    return Reading(tokens / seconds[0], tokens / seconds[1], size / tokens)


@torch.inference_mode()
def rounding(bf16: StoreReader, fp8: StoreReader, target: TargetModel, samples: list[Sample]) -> str:
    """How far fp8 moves the states of some documents, and the target's next token after them."""
    away: dict[Tap, list[float]] = {}
    same = rows = 0
    for sample in samples[:4]:
        (exact, _), (rounded, _) = bf16.read(sample), fp8.read(sample)
        for tap, value in exact.items():
            away.setdefault(tap, []).append(difference(rounded[tap], value))
        first, second = (target.lm_head(found[Tap.final][-128:]).argmax(-1) for found in (exact, rounded))
        same, rows = same + int((first == second).sum()), rows + len(first)
    taps = ", ".join(f"{tap}: {np.mean(values):.1%}" for tap, values in away.items())
    return f"fp8 moves the states by {taps} of their length, the target's next token at {1 - same / rows:.1%} of {rows}"


def train(recipe: Recipe, target: TargetModel, source: StoredFeatures, batches: list[list[Row]]) -> float:
    """Tokens a second of forward, backward and update; the first step warms up."""
    torch.manual_seed(0)
    drafter = build_drafter(recipe.drafter, target.config, None, target.device)
    init_from_target(drafter, target)
    objective = Objective(recipe.loss)
    dtype = torch.bfloat16 if recipe.training.precision == "bf16" else torch.float32
    step = TrainStep(drafter, objective, target.head(), drafter.vocab_map, dtype)
    optimizer = make_optimizer(drafter, recipe.training, CPU)
    tokens, seconds = 0, 0.0
    for number, rows in enumerate(batches):
        batch = source.batch(rows, CPU)
        began = time.perf_counter()
        step(batch, objective.counts(batch, drafter.max_depth)).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if number:
            seconds += time.perf_counter() - began
            tokens += sum(len(sample.ids) for row in rows for sample in row)
    return tokens / seconds


def main() -> int:
    """Print the table; 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/smollm2/eagle3.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--documents", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="of a document, on average")
    parser.add_argument("--steps", type=int, default=3, help="training steps, the first of which is not counted")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the stores are written; default: a temporary folder")
    args = parser.parse_args()
    recipe = load_recipe(args.recipe, args.overrides)
    target = load_target(recipe.target)
    target.prepare_for_inference()
    samples = documents(args.documents, args.tokens, target.tokenizer)
    batches = micro_batches(recipe, samples)
    identity = bf16_identity(recipe, target)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        bf16, fp8 = Path(folder) / "bf16", Path(folder) / "fp8"
        began = time.perf_counter()
        build_store(bf16, identity, target, samples, recipe.features)
        built = time.perf_counter() - began
        fp8_identity = convert_store(bf16, fp8, dtype="fp8")
        readings = {
            "bf16": read(bf16, identity, samples, batches, args.workers),
            "fp8": read(fp8, fp8_identity, samples, batches, args.workers),
        }
        rounded = open_store(fp8, fp8_identity, samples, "size")
        moved = rounding(open_store(bf16, identity, samples, "size"), rounded, target, samples)
        source = StoredFeatures(rounded)
        consumed = train(recipe, target, source, batches[: args.steps])
    tokens = sum(len(sample.ids) for sample in samples)
    print(f"{torch.get_num_threads()} threads, {tokens} tokens in {len(samples)} documents, {args.workers} worker(s)")
    print(f"the target computes and writes {tokens / built:,.0f} tokens/s; training takes {consumed:,.0f}")
    print(
        f"{'store':6} {'bytes/token':>12} {'from disk':>12} {'x training':>10} {'from memory':>12} {'x training':>10}"
    )
    for name, found in readings.items():
        print(
            f"{name:6} {found.bytes_per_token:12,.0f} {found.from_disk:12,.0f} {found.from_disk / consumed:10,.0f} "
            f"{found.from_memory:12,.0f} {found.from_memory / consumed:10,.0f}"
        )
    print(moved)
    share = readings["fp8"].bytes_per_token / readings["bf16"].bytes_per_token
    slowest = min(found.from_disk for found in readings.values()) / consumed
    print(f"reading gives at least {slowest:,.0f}x what training takes; fp8 takes {share:.3f} of the bytes of bf16")
    return 0 if slowest >= LEAST_RATIO and share <= MOST_BYTES else 1


if __name__ == "__main__":
    raise SystemExit(main())
