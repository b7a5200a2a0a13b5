"""One EAGLE-3 training step (forward, loss, backward, AdamW): tokens a second and peak memory.

    python eval/step_speed.py                                  # rows of 4,096 tokens against rows of 512
    python eval/step_speed.py --speculators LIBS               # and other trainers' steps on the same shapes
    python eval/step_speed.py --specforge LIBS --shapes smollm2-8k
    python eval/step_speed.py --compile --shapes smollm2-8k --long 0       # and with training.compile

The features of the target are random, as if they came from a store: the target's own forward, which is the same for
every trainer, is left out. Each measurement is a process of its own. Memory is what the process holds at its peak
beyond what it held before the draft was made: weights, optimiser, activations and loss, not the interpreter.

Exits with 1 if rows of 4,096 train at less than 0.6 of the tokens/s of rows of 512 or take more than 9 times their
memory, or if another trainer that ran is passed by less than 2 times in tokens/s or 3 times in memory.

LIBS is a folder with the other trainer's code, which runs with the torch and transformers that are here:

    pip install --no-deps --target LIBS specforge==0.2.0        # needs Triton and a GPU
    pip install --no-deps --target LIBS speculators==0.9.0 hs-connectors==0.9.0 loguru pydantic-settings openai \\
        distro jiter sniffio

They train on the same tokens with the same autocast, through torch's SDPA, with the losses that they have without
Triton. speculators takes one row, so it is given the documents packed behind each other.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAST_SPEED, MOST_MEMORY = 0.6, 9.0
LEAST_FASTER, LEAST_LEANER = 2.0, 3.0


@dataclass(frozen=True)
class Shape:
    """Of a target, and how much of its vocabulary the draft speaks."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int
    draft_vocab: int


SHAPES = {
    "smollm2-8k": Shape(576, 1536, 9, 3, 49152, 8192),
    "smollm2-full": Shape(576, 1536, 9, 3, 49152, 49152),
    "h1024-32k": Shape(1024, 3072, 16, 8, 32000, 32000),
    "tiny": Shape(64, 128, 4, 2, 512, 256),
}
Step = Callable[[], Any]


def text_config(shape: Shape) -> Any:
    """The target's, as transformers has it."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=8,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=8192,
    )


def ours(shape: Shape, rows: int, length: int, depth: int, precision: str, compile: bool = False) -> Step:
    """drafttrain's step; `compile` as in a recipe's `training`."""
    import torch

    from drafttrain.drafters.base import DraftBatch
    from drafttrain.drafters.build import build_drafter
    from drafttrain.drafters.eagle.config import Eagle3Config
    from drafttrain.features.sources import taps_with_final
    from drafttrain.losses.config import LossConfig
    from drafttrain.losses.objective import Objective
    from drafttrain.modeling.head import Head
    from drafttrain.modeling.vocab_map import VocabMap
    from drafttrain.recipe.training_config import TrainingConfig
    from drafttrain.training.step import TrainStep
    from drafttrain.training.trainer import make_optimizer

    text, dtype = text_config(shape), torch.bfloat16 if precision == "bf16" else torch.float32
    vocab_map = VocabMap.from_ids(range(shape.draft_vocab), shape.vocab)
    config = Eagle3Config(draft_vocab_size=shape.draft_vocab if shape.draft_vocab < shape.vocab else None, depth=depth)
    drafter = build_drafter(config, text, vocab_map)
    embedding = torch.randn(shape.vocab, shape.hidden, dtype=dtype) * 0.02
    drafter.bind(embedding, Head(embedding))
    if compile:
        drafter.compile_training()
    objective = Objective(LossConfig.model_validate({"terms": [{"name": "forward_kl"}]}))
    step = TrainStep(drafter, objective, Head(embedding), drafter.vocab_map, dtype)
    optimizer = make_optimizer(drafter, TrainingConfig(max_steps=1), torch.device("cpu"))
    taps = taps_with_final(drafter.feature_spec)

    def once() -> float:
        tokens = torch.randint(0, shape.draft_vocab, (rows, length))
        batch = DraftBatch(
            tokens=tokens,
            positions=torch.arange(length).expand(rows, length),
            segments=torch.zeros(rows, length, dtype=torch.int64),
            spans=torch.ones(rows, length, dtype=torch.int64),
            features={tap: torch.randn(rows, length, shape.hidden, dtype=dtype) for tap in taps},
            top1=torch.randint(0, shape.draft_vocab, (rows, length)),
        )
        loss = step(batch, objective.counts(batch, depth)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return once


def speculators(shape: Shape, rows: int, length: int, depth: int, precision: str) -> Step:
    """The step of speculators: its eager losses, SDPA."""
    import torch
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    text = text_config(shape)
    text.num_hidden_layers, text._attn_implementation = 1, "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=text,
        draft_vocab_size=shape.draft_vocab,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=depth)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.isnan().any():
                parameter.normal_(std=0.02)
    model.lm_head.weight.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    total, dtype = rows * length, torch.bfloat16 if precision == "bf16" else torch.float32
    losses = resolve_loss_config("kl_div", "eager")
    documents = torch.arange(rows).repeat_interleave(length)[None]
    positions = torch.arange(length).repeat(rows)[None]

    def once() -> float:
        with _autocast(precision):
            _, loss, _ = model(
                hidden_states=torch.randn(1, total, 3 * shape.hidden, dtype=dtype).float(),
                input_ids=torch.randint(0, shape.vocab, (1, total)),
                document_ids=documents,
                position_ids=positions,
                loss_mask=torch.ones(1, total, dtype=torch.bool),
                verifier_last_hidden_states=torch.randn(1, total, shape.hidden, dtype=dtype).float(),
                ttt_steps=depth,
                loss_config=losses,
            )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return once


def specforge(shape: Shape, rows: int, length: int, depth: int, precision: str) -> Step:
    """The step of SpecForge: SDPA."""
    import torch
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

    text = text_config(shape)
    text.draft_vocab_size, text.pad_token_id = shape.draft_vocab, 0
    draft = LlamaForCausalLMEagle3(text, attention_backend="sdpa")
    draft.t2d[shape.draft_vocab :] = False
    draft.embed_tokens.requires_grad_(False)
    model = OnlineEagle3Model(draft, length=depth, attention_backend="sdpa").train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)
    head = torch.randn(shape.vocab, shape.hidden) * 0.02
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32

    def once() -> float:
        with _autocast(precision):
            states = torch.randn(rows, length, shape.hidden, dtype=dtype).float()
            _, _, losses, *_ = model(
                input_ids=torch.randint(0, shape.vocab, (rows, length)),
                attention_mask=torch.ones(rows, length, dtype=torch.int64),
                target=states @ head.T,
                loss_mask=torch.ones(rows, length, 1),
                hidden_states=torch.randn(rows, length, 3 * shape.hidden, dtype=dtype).float(),
            )
            loss = sum(losses)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return once


def _autocast(precision: str) -> Any:
    import torch

    return torch.autocast("cpu", dtype=torch.bfloat16) if precision == "bf16" else nullcontext()


TRAINERS = {"drafttrain": ours, "speculators": speculators, "specforge": specforge}


def resident(key: str) -> float:
    """VmRSS (now) or VmHWM (highest since the reset) of this process, in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"no {key} in /proc/self/status"
    return int(found[1]) * 1024.0


def work(job: dict[str, Any]) -> dict[str, float]:
    """This process's measurement: the first step is not timed."""
    import torch

    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    # A small step first: what code and libraries take when they are first used is no part of a step.
    TRAINERS[job["trainer"]](SHAPES["tiny"], 1, 16, 2, job["precision"])()
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    shape = SHAPES[job["shape"]]
    options = {"compile": job["compile"]} if job["trainer"] == "drafttrain" else {}
    step = TRAINERS[job["trainer"]](shape, job["rows"], job["length"], job["depth"], job["precision"], **options)
    losses = [step()]
    began = time.perf_counter()
    losses += [step() for _ in range(job["steps"])]
    seconds = (time.perf_counter() - began) / job["steps"]
    assert all(loss == loss for loss in losses), f"the loss is NaN: {losses}"
    return {
        "tokens_per_s": job["rows"] * job["length"] / seconds,
        "mb": (resident("VmHWM") - before) / 1e6,
        "loss": losses[0],
    }


def measure(job: dict[str, Any], libs: Path | None = None) -> dict[str, float] | str:
    """A measurement in a process of its own, or the last line of what went wrong."""
    environment = dict(os.environ, OMP_NUM_THREADS=str(job["threads"]))
    root = Path(__file__).resolve().parent.parent
    places = [str(root)] if libs is None else [str(libs), str(root)]
    environment["PYTHONPATH"] = os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, __file__, "--work", json.dumps(job)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1][:200]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(name: str, found: dict[str, float] | str) -> None:
    if isinstance(found, str):
        print(f"{name:<44} did not run: {found}")
    else:
        print(f"{name:<44} {found['tokens_per_s']:9.1f} tokens/s {found['mb']:9.1f} MB")


def long_rows(job: dict[str, Any], lengths: tuple[int, int]) -> bool:
    """One long row against short ones; whether both ratios are as they must be."""
    short, long = lengths
    found = [
        measure({**job, "rows": 1, "length": length, "steps": steps})
        for length, steps in ((short, job["steps"] * long // short), (long, job["steps"]))
    ]
    for length, one in zip(lengths, found, strict=True):
        show(f"{job['shape']}, 1 x {length}", one)
    one, other = found
    if isinstance(one, str) or isinstance(other, str):
        return False
    speed, memory = other["tokens_per_s"] / one["tokens_per_s"], other["mb"] / one["mb"]
    print(f"rows of {long} against {short}: tokens/s {speed:.2f} (at least {LEAST_SPEED}), "
          f"memory {memory:.2f} (at most {MOST_MEMORY})")  # fmt: skip
    return speed >= LEAST_SPEED and memory <= MOST_MEMORY


def compiled(job: dict[str, Any], shapes: list[str]) -> None:
    """A batch with and without `training.compile`."""
    for shape in shapes:
        with_it, without = (measure({**job, "shape": shape, "compile": on}) for on in (True, False))
        show(f"{shape}, {job['rows']} x {job['length']}, compiled", with_it)
        show(f"{shape}, {job['rows']} x {job['length']}", without)
        if not isinstance(with_it, str) and not isinstance(without, str):
            print(f"compiled: {with_it['tokens_per_s'] / without['tokens_per_s']:.2f} x the tokens/s, "
                  f"{with_it['mb'] / without['mb']:.2f} x the memory")  # fmt: skip


def against(job: dict[str, Any], rows: int, length: int, others: dict[str, Path]) -> bool:
    """A batch of ours and of others; whether those that ran are passed by enough."""
    job = {**job, "rows": rows, "length": length}
    own = measure(job)
    show(f"{job['shape']}, {rows} x {length}, drafttrain", own)
    good = not isinstance(own, str)
    for name, libs in others.items():
        theirs = measure({**job, "trainer": name}, libs)
        show(f"{job['shape']}, {rows} x {length}, {name}", theirs)
        if isinstance(own, str) or isinstance(theirs, str):
            continue
        speed, memory = own["tokens_per_s"] / theirs["tokens_per_s"], theirs["mb"] / own["mb"]
        print(f"against {name}: {speed:.2f} x its tokens/s (at least {LEAST_FASTER}), 1/{memory:.2f} of its memory "
              f"(at most 1/{LEAST_LEANER:.0f})")  # fmt: skip
        good = good and speed >= LEAST_FASTER and memory >= LEAST_LEANER
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["smollm2-8k", "smollm2-full", "h1024-32k"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--long", type=int, default=4096, help="tokens of a long row; 0 leaves that out")
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="timed steps, after one that is not")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--compile", action="store_true", help="ours with training.compile, and against it without")
    parser.add_argument("--speculators", type=Path, metavar="LIBS")
    parser.add_argument("--specforge", type=Path, metavar="LIBS")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps(work(json.loads(args.work))))
        return
    others = {name: libs for name in ("speculators", "specforge") if (libs := getattr(args, name)) is not None}
    job = {"trainer": "drafttrain", "depth": args.depth, "steps": args.steps, "threads": args.threads,
           "precision": args.precision, "compile": args.compile}  # fmt: skip
    good = True
    if args.compile:
        compiled({**job, "rows": args.rows, "length": args.length}, args.shapes)
    if args.long:
        good = long_rows({**job, "shape": args.shapes[0]}, (args.length, args.long))
    for shape in args.shapes if others else ():
        good = against({**job, "shape": shape}, args.rows, args.length, others) and good
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
