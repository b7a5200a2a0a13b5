"""Products of few rows with a weight: plain `F.linear` against the blocked layout of `ops/packed_linear`.

    python eval/linear_speed.py --threads 1
    python eval/linear_speed.py --dtype float32

Weights of SmolLM2's sizes, more of them than a cache holds, are gone through in turn, as decoding does. Plain and
packed take turns; times are medians, the ratio is taken pair by pair and its median printed with the range.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from drafttrain.ops.packed_linear import Matrix, linear, pack

SHAPES = ((1536, 576), (576, 1536), (576, 576), (49152, 576))
ROWS = (1, 5, 8, 64, 512)
BYTES = 80e6


def main() -> None:
    """Print a line a shape and number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's own choice")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {options.dtype}")
    print("weight, rows: plain, packed, plain / packed")
    for out, inside in SHAPES:
        size = out * inside * dtype.itemsize
        plain = [torch.randn(out, inside).to(dtype) for _ in range(max(1, int(BYTES / size)))]
        packed = [weight for weight in map(pack, plain) if weight is not None]
        if not packed:
            raise SystemExit("this torch has no blocked layout for that on this machine")
        for rows in ROWS:
            x = torch.randn(rows, inside).to(dtype)
            pairs = [(_seconds(x, plain), _seconds(x, packed)) for _ in range(options.repeats + 1)][1:]
            ratios = sorted(a / b for a, b in pairs)
            times = [statistics.median(column) * 1e3 for column in zip(*pairs, strict=True)]
            print(
                f"{out} x {inside}, {rows}: {times[0]:.2f} ms, {times[1]:.2f} ms, "
                f"{statistics.median(ratios):.2f}x ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            )


@torch.inference_mode()
def _seconds(x: torch.Tensor, weights: Sequence[Matrix]) -> float:
    """Of one product, over all weights."""
    start = time.perf_counter()
    for weight in weights:
        linear(x, weight)
    return (time.perf_counter() - start) / len(weights)


if __name__ == "__main__":
    main()
