"""Peak memory of the objective, forward and backward, beyond its inputs.

    python eval/loss_memory.py                     # 4,096 rows, 131,072 tokens, 64 supervised rows
    python eval/loss_memory.py --supervised 1024 --depths 4

Counted: everything that the objective allocates, the scratch of the libraries below it and the gradient of the
draft's states included. On a CPU it is the high-water mark of the resident set, on a GPU that of the allocator.
Not counted: the inputs (draft states, final features, both heads). With a trained head there are also, and shown
apart, its copy in the dtype of the products and its gradient in fp32; both are as large as the head, whatever the
loss does.
"""

from __future__ import annotations

import argparse
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from drafttrain.drafters.base import DepthOutput, DraftBatch
from drafttrain.losses.config import LossConfig
from drafttrain.losses.objective import Objective
from drafttrain.modeling.head import Head
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap

MB = 1e6
LIMIT_MB = 200.0


def resident(key: str) -> float:
    """VmRSS (now) or VmHWM (highest since the reset) of this process, in bytes."""
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, f"no {key} in /proc/self/status"
    return int(found[1]) * 1024.0


def peak_of(work: Callable[[], object], device: torch.device) -> float:
    """Bytes at the peak of `work` above those before it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return float(torch.cuda.max_memory_allocated(device) - before)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before


def build(args: argparse.Namespace, device: torch.device) -> tuple[list[Tensor], DraftBatch]:
    """Draft states of each depth, and a batch with spans that give exactly the wanted labels at depth 0."""
    rows, length = 4, args.rows // 4
    per_row = args.supervised // rows
    assert per_row * rows == args.supervised and per_row + 3 < length, "supervised rows must fit four rows"
    spans = torch.zeros(rows, length, dtype=torch.int64)
    spans[:, 2 : 3 + per_row] = 1  # the first token of a span is no label
    shape = (rows, length)
    batch = DraftBatch(
        tokens=torch.randint(0, args.vocabulary, shape),
        positions=torch.arange(length).expand(shape),
        segments=torch.zeros(shape, dtype=torch.int64),
        spans=spans,
        features={Tap.final: torch.randn(*shape, args.hidden, dtype=torch.bfloat16).to(device)},
        top1=torch.randint(0, args.vocabulary, shape),
    )
    for name in ("tokens", "positions", "segments", "spans", "top1"):
        setattr(batch, name, getattr(batch, name).to(device))
    readouts = [
        torch.randn(*shape, args.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
        for _ in range(args.depths)
    ]
    return readouts, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--supervised", type=int, default=64)
    parser.add_argument("--depths", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--terms", nargs="+", default=["soft_ce"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.manual_seed(0)

    readouts, batch = build(args, device)
    target = torch.empty(args.vocabulary, args.hidden, dtype=torch.bfloat16, device=device).uniform_(-0.05, 0.05)
    vocab_map = VocabMap.full(args.vocabulary).to(device)
    vocab_map.to_draft  # noqa: B018  made once, an input
    objective = Objective(LossConfig.model_validate({"terms": [{"name": name} for name in args.terms]}))
    counts = objective.counts(batch, args.depths)
    outputs = [DepthOutput(k, k + 2, readout) for k, readout in enumerate(readouts)]

    def step(head: Head) -> None:
        for readout in readouts:
            readout.grad = None
        out = objective(outputs, batch, lambda depth: head, Head(target), vocab_map, counts)
        out.loss.backward()

    # What the libraries allocate at first use is no part of a step.
    torch.ones(8, args.hidden, dtype=torch.bfloat16) @ torch.ones(args.hidden, 64, dtype=torch.bfloat16)

    frozen = target.clone()  # another head than the target's, as in a draft
    objective_only = peak_of(lambda: step(Head(frozen)), device) / MB
    trained = target.float().requires_grad_()
    with_head = peak_of(lambda: step(Head(trained)), device) / MB
    copy, gradient = trained.numel() * 2 / MB, trained.numel() * 4 / MB

    dense = args.rows * args.depths * args.vocabulary * 4 / MB
    print(f"{args.rows} rows x {args.vocabulary} tokens, {args.supervised} supervised, {args.depths} depth(s), "
          f"H {args.hidden}, bf16, {' + '.join(args.terms)}, {device.type}")  # fmt: skip
    print(f"objective, head frozen:   {objective_only:8.1f} MB  (limit {LIMIT_MB:.0f} MB)")
    print(f"with a trained head:      {with_head:8.1f} MB  (of which its bf16 copy {copy:.1f}, "
          f"its fp32 gradient {gradient:.1f}, the rest {with_head - copy - gradient:.1f})")  # fmt: skip
    print(f"for comparison, one dense fp32 tensor of all logits: {dense:.1f} MB")
    if args.supervised <= 64 and objective_only > LIMIT_MB:
        raise SystemExit(f"the objective takes {objective_only:.1f} MB, more than {LIMIT_MB:.0f} MB")


if __name__ == "__main__":
    main()
