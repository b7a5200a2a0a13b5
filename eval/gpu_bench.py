"""What a GPU owes: kernels against their definitions, graphs, greedy identity in bf16, and the ceiling table.

    python eval/gpu_bench.py --out eval/leaderboard/gpu          # under 10 minutes on one GPU of 40 GB or more
    python eval/gpu_bench.py --tiny --out /tmp/gpu               # the same script on a tiny model, on a CPU too

The target has the shape of Llama-3.1-8B and random weights, the draft that of its EAGLE-3; a synthetic choice in place
of the target's argmax sets the acceptance, while everything that a real round computes is computed. The bandwidth and
the arithmetic that the ceilings rest on are measured here: a large copy and a large product. Times are medians. Results
are written as JSON and printed as tables.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor

from drafttrain.bench.divergence import AnswerPair, exact_match, top2_gap
from drafttrain.drafters.build import build_drafter, init_from_target, new_vocab_map
from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.engine.device_rounds import DeviceRounds, RoundInput
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import build_proposer
from drafttrain.engine.proposers.on_device import DeviceDraft, Drafted
from drafttrain.engine.records import Request
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import FeatureSpec, Tap

ROOT = Path(__file__).resolve().parents[1]
RATE = 0.8
"""Conditional acceptance of the synthetic choice."""
_TESTS_S, _SANITIZER_S = 240, 45
"""Seconds that the tests and each tool of the sanitizer may take; the rest of ten minutes is for the tables."""

LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
}
# Nodes of a tree: the chain of 6, and trees of EAGLE's depth.
SHAPES: dict[int, TreeShape | DynamicTree | None] = {
    6: None,
    16: DynamicTree(depth=4, top_k=4, nodes=16),
    60: DynamicTree(depth=6, top_k=10, nodes=60),
}
Row = dict[str, Any]


def build(sizes: dict[str, Any], device: torch.device, dtype: torch.dtype) -> CausalLM:
    """A random Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, rope_theta=500000.0)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return CausalLM(model.to(device).eval()).requires_grad_(False).eval()


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of `work`, which is run once before."""
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def roof(device: torch.device, dtype: torch.dtype, tiny: bool) -> tuple[float, float]:
    """Bytes a second of a large copy (read and written), and operations a second of a large product."""
    size = 1 << (20 if tiny else 31)
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * size / seconds(lambda: target.copy_(source), device, 5)
    width = 256 if tiny else 8192
    a = torch.randn(width, width, device=device, dtype=dtype)
    return bandwidth, 2 * width**3 / seconds(lambda: a @ a, device, 5)


class Synthetic:
    """The target's choice, made to agree with the first child of a place at a given rate."""

    def __init__(self, rate: float, vocab_size: int) -> None:
        self.rate, self.vocab_size = rate, vocab_size

    def __call__(self, logits: Tensor, drafted: Drafted) -> Tensor:
        """Takes the argmax too, as a real round does."""
        best = logits.argmax(-1)
        rows, nodes = drafted.tokens.shape
        if nodes == 0:
            return best
        place = torch.arange(nodes + 1, device=best.device)
        own = drafted.parents[:, None] == place[:, None]
        first = own.long().argmax(-1).expand(rows, -1)
        token = drafted.tokens.gather(1, first)
        agrees = (torch.rand(rows, nodes + 1, device=best.device) < self.rate) & own.any(-1)
        return torch.where(agrees, token, (token + 1) % self.vocab_size)


class Fixed(DeviceDraft):
    """A tree of given size that costs nothing to draft."""

    def __init__(self, nodes: int, rows: int, device: torch.device) -> None:
        chain = nodes <= 6
        branching = (1,) * nodes if chain else (4, 2, 1) if nodes <= 20 else (4, 2, 2, 1, 1)
        shape = TreeShape.from_branching(branching)
        shape = TreeShape(shape.parents[:nodes])
        tree = shape.on(device)[0]
        self.feature_spec, self.reach = FeatureSpec(), shape.depth
        tokens = torch.arange(shape.nodes, device=device).expand(rows, -1).contiguous()
        counts = torch.full((rows,), shape.nodes, device=device)
        self._all = Drafted(tokens, counts, tree.parents, tree.depths, None if chain else tree.sees)
        self.nodes = shape.nodes

    def draft(self, lengths: Tensor, room: Tensor) -> Drafted:
        """Always the same."""
        return self._all._replace(tokens=self._all.tokens[: len(lengths)], counts=self._all.counts[: len(lengths)])

    def observe(self, lengths: Tensor, following: Tensor, features: dict[Tap, Tensor], accepted: Tensor) -> None:
        """Nothing to learn."""

    def commit(self, accepted: Tensor) -> None:
        """Nothing kept."""


@torch.inference_mode()
def rounds_of(rounds: DeviceRounds, batch: int, context: int, count: int) -> Iterator[tuple[float, float, float, int]]:
    """Play rounds from a filled context on: seconds in all, drafting, verifying, and tokens emitted, a round."""
    lengths = [context] * batch
    for number in range(count + 2):
        rows = [RoundInput(length, 1, 64) for length in lengths]
        start = time.perf_counter()
        played = rounds.play(rows)
        took = time.perf_counter() - start
        lengths = [length + kept + 1 for length, kept in zip(lengths, played.accepted, strict=True)]
        if number >= 2:  # the first ones record graphs
            yield took, played.draft_s, played.verify_s, sum(played.accepted) + batch


def measure(rounds: DeviceRounds, batch: int, context: int, count: int) -> Row:
    """Medians of `count` rounds."""
    took, draft, verify, emitted = zip(*rounds_of(rounds, batch, context, count), strict=True)
    per_round = sum(emitted) / len(emitted) / batch
    return {
        "round_ms": 1e3 * statistics.median(took),
        "draft_ms": 1e3 * statistics.median(draft),
        "verify_ms": 1e3 * statistics.median(verify),
        "host_ms": 1e3 * statistics.median(t - d - v for t, d, v in zip(took, draft, verify, strict=True)),
        "tau": per_round,
        "tokens_per_s": batch * per_round / statistics.mean(took),
    }


class Ceiling:
    """The table for one target. Caches are made once a batch and filled with noise: no prompt has to be read."""

    def __init__(self, target: CausalLM, args: argparse.Namespace) -> None:
        self.target, self.args, self.device = target, args, target.device
        self.bandwidth, self.flops = roof(self.device, target.dtype, args.tiny)
        self.weights = sum(p.numel() for p in target.parameters()) - target.embedding_weight.numel()
        self.width = target.dtype.itemsize
        config = target.config
        head_dim = config.hidden_size // config.num_attention_heads
        self.kv = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * self.width

    def least_s(self, batch: int, tokens: int) -> float:
        """Seconds that a forward of `tokens` a row takes at least: what is read, or what is multiplied."""
        read = self.weights * self.width + batch * self.args.context * self.kv
        return max(read / self.bandwidth, 2 * self.weights * batch * tokens / self.flops)

    def rows(self, batch: int) -> Iterator[Row]:
        """Plain decoding, verification alone, and whole rounds."""
        args, target = self.args, self.target
        cache = target.new_cache(batch, args.context + 8 * (args.rounds + 4) + 128)
        for layer in (*cache.k, *cache.v):
            layer.normal_()

        def play(draft: DeviceDraft | None, rate: float) -> Row:
            choose = Synthetic(rate, target.vocab_size)
            rounds = DeviceRounds(target, cache, draft, batch, capture=not args.no_graphs, choose=choose)
            return measure(rounds, batch, args.context, args.rounds)

        plain = play(None, 0.0)
        least = 1e3 * self.least_s(batch, 1)
        yield {"batch": batch, "what": "plain", **plain, "least_ms": least, "of_roof": least / plain["round_ms"]}
        for nodes in SHAPES:
            fixed = Fixed(nodes, batch, self.device)
            row = play(fixed, 0.0)
            least = 1e3 * self.least_s(batch, fixed.nodes + 1)
            yield {
                "batch": batch, "what": f"verify {fixed.nodes}", "verify_ms": row["verify_ms"], "least_ms": least,
                "of_roof": least / row["verify_ms"], "against_plain": row["verify_ms"] / plain["verify_ms"],
            }  # fmt: skip
        for nodes, shape in SHAPES.items():
            draft = self._draft(batch, cache.length, shape, nodes)
            row = play(draft, RATE)
            step = row["draft_ms"] / draft.reach  # its reading of the target's features is the first
            predicted = row["tau"] * plain["round_ms"] / (row["draft_ms"] + row["verify_ms"])
            speed_up = row["tokens_per_s"] / plain["tokens_per_s"]
            yield {
                "batch": batch, "what": f"EAGLE-3, {'chain' if shape is None else 'tree'} {nodes}", **row,
                "step_ms": step, "step_of_target": step / plain["round_ms"],
                "speed_up": speed_up, "ceiling": predicted, "of_ceiling": speed_up / predicted,
            }  # fmt: skip

    def _draft(self, batch: int, length: int, shape: TreeShape | DynamicTree | None, nodes: int) -> DeviceDraft:
        proposer = build_proposer(new_draft(self.target, self.args.draft_vocabulary), tree=shape)
        proposer.reserve(batch, length)
        draft = proposer.on_device(nodes)
        assert draft is not None
        return draft


def new_draft(target: CausalLM, vocabulary: int) -> Any:
    """A random EAGLE-3 in the target's dtype."""
    config = Eagle3Config(family="eagle3", draft_vocab_size=min(vocabulary, target.vocab_size))
    vocab_map = new_vocab_map(config, target.vocab_size, torch.zeros(target.vocab_size))
    drafter = build_drafter(config, target.config, vocab_map, target.device).to(target.dtype)
    init_from_target(drafter, target)
    return drafter.requires_grad_(False).eval()


def identity(target: CausalLM, tokens: int) -> Row:
    """Greedy outputs with drafts, host's rounds and device's, against plain decoding on the host; ties told apart."""
    prompts = [[(7 * i + 3 * j) % 89 + 3 for j in range(5 + 4 * i)] for i in range(4)]
    requests = [Request(str(i), prompt, tokens) for i, prompt in enumerate(prompts)]
    plain = Engine(target, max_batch=4, max_length=256, on_device=False).generate(requests)
    found: Row = {}
    for name, shape in (("chain", None), ("static", TreeShape.from_branching((3, 2, 1))), ("dynamic", SHAPES[16])):
        for on_device in (False, True):
            proposer = build_proposer(new_draft(target, 32_000), tree=shape)
            engine = Engine(target, proposer, k=4, max_batch=4, max_length=256, on_device=on_device)
            pairs = [
                AnswerPair(r.id, 0, r.prompt_ids, got.tokens, want.tokens)
                for r, got, want in zip(requests, engine.generate(requests), plain, strict=True)
            ]
            match = exact_match(pairs, lambda ids: top2_gap(target, ids))
            # A bf16 logit of magnitude 8 to 16 has a step of 1/16; sums in another order differ by a few.
            limit = 0.25 if target.dtype == torch.bfloat16 else 1e-3
            gaps = [d.gap for d in match.divergences]
            found[f"{name}, {'device' if on_device else 'host'}"] = {
                "equal": match.matched, "of": match.total, "gaps": gaps, "only_ties": all(gap < limit for gap in gaps),
            }  # fmt: skip
    return found


def checks() -> Row:
    """Tests of kernels and graphs, and the sanitizer where there is one."""
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "tests/kernels", "tests/gpu"]
    code, said = attempt(tests, _TESTS_S)
    found: Row = {"tests": (said.strip().splitlines() or ["nothing was said"])[-1], "passed": code == 0}
    if not found["passed"]:
        found["output"] = said[-4000:]
    sanitizer = shutil.which("compute-sanitizer")
    for tool in ("memcheck", "racecheck"):
        if sanitizer is None:
            found[tool] = "compute-sanitizer is not installed"
            continue
        some = ["-m", "pytest", "-q", "-x", "tests/kernels", "-k", "compaction or matching or decoding or selection"]
        run = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, *some]
        code, said = attempt(run, _SANITIZER_S)
        found[tool] = "clean" if code == 0 else said[-2000:]
    return found


def attempt(command: list[str], limit_s: int) -> tuple[int | None, str]:
    """Exit status and output of a command; None where it took too long, so that the tables come all the same."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        return None, f"{said}\nstopped after {limit_s} s"
    return done.returncode, done.stderr + done.stdout


def show(console: Console, rows: list[Row]) -> None:
    """The ceiling table."""
    columns = {
        "batch": "batch", "what": "what", "round_ms": "round ms", "draft_ms": "draft", "step_ms": "a step",
        "verify_ms": "verify", "host_ms": "host", "least_ms": "least", "of_roof": "of the roof", "tau": "tau",
        "tokens_per_s": "tok/s", "speed_up": "speed-up", "ceiling": "ceiling", "of_ceiling": "of it",
    }  # fmt: skip
    table = Table(*columns.values(), title=f"Synthetic acceptance {RATE}")
    for row in rows:
        cells = [row.get(key, "") for key in columns]
        table.add_row(*(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells))
    console.print(table)


def main() -> None:
    """Run everything; exit with 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="folder for gpu_bench.json")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, any device, without the tests")
    parser.add_argument("--batch", type=int, nargs="+", help="default: 1 8 32 64; tiny: 1 3")
    parser.add_argument("--context", type=int, help="tokens in the cache; default: 1024, tiny: 24")
    parser.add_argument("--rounds", type=int, help="measured a row; default: 30, tiny: 3")
    parser.add_argument("--draft-vocabulary", type=int, default=32_000)
    parser.add_argument("--no-graphs", action="store_true", help="call what would be recorded, to compare")
    parser.add_argument("--skip-checks", action="store_true", help="the table alone")
    args = parser.parse_args()
    if not args.tiny and not torch.cuda.is_available():
        parser.error("no CUDA device; --tiny runs anywhere")
    args.batch = args.batch or ([1, 3] if args.tiny else [1, 8, 32, 64])
    args.context = args.context or (24 if args.tiny else 1024)
    args.rounds = args.rounds or (3 if args.tiny else 30)
    start, console = time.perf_counter(), Console(width=None if sys.stdout.isatty() else 160)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    result: Row = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "cuda": torch.version.cuda},
        "command": " ".join(["python", *sys.argv]),
        "tiny": args.tiny, "dtype": str(dtype), "context": args.context, "rate": RATE, "graphs": not args.no_graphs,
    }  # fmt: skip
    if not args.skip_checks and not args.tiny:
        result["checks"] = checks()
        console.print(result["checks"])
    target = build(TINY if args.tiny else LLAMA_8B, device, dtype)
    target.prepare_for_inference()
    if not args.skip_checks:
        result["identity"] = identity(target, 12 if args.tiny else 64)
        console.print(result["identity"])
    ceiling = Ceiling(target, args)
    result |= {"bytes_per_s": ceiling.bandwidth, "flops_per_s": ceiling.flops}
    result["rows"] = [row for batch in args.batch for row in ceiling.rows(batch)]
    result["took_s"] = time.perf_counter() - start
    show(console, result["rows"])
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "gpu_bench.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    console.print(f"{args.out / 'gpu_bench.json'}, {result['took_s']:.0f} s")
    failed = not result.get("checks", {}).get("passed", True)
    if failed or not all(found["only_ties"] for found in result.get("identity", {}).values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
