"""Plain decoding of the bundled engine against `generate` of transformers and, if asked for, vLLM's CPU build.

    python eval/decode_speed.py                          # the embedded target in the machine's dtype, batch 1 and 8
    python eval/decode_speed.py --repeats 5 --threads 2
    python eval/decode_speed.py --vllm eager             # vLLM too, in its own environment (see `drafttrain prove`)

All decode greedily from the same prompts for the same number of tokens (no stop token) in the same dtype on the same
number of threads, in turns; ratios are taken turn by turn, and their median is printed with the range. Prefill is
included on all sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from drafttrain.engine.engine import Engine
from drafttrain.engine.records import Request
from drafttrain.errors import UserError
from drafttrain.export.prove.environment import vllm_environment
from drafttrain.export.prove.prove import server_target
from drafttrain.export.prove.server import server_variables, vllm_options
from drafttrain.targets.config import AUTO, TargetConfig
from drafttrain.targets.load import load_target
from drafttrain.targets.model import TargetModel
from drafttrain.targets.native import settled

PROMPTS = [
    "Explain how a bicycle stays upright.",
    "Write a short poem about the sea at night.",
    "List five uses of baking soda in a household.",
    "What is the difference between weather and climate?",
    "Give me a recipe for a simple vegetable soup.",
    "Write a Python function that reverses a list.",
    "Describe the life of a honey bee.",
    "How do vaccines work?",
]
BATCHES = (1, 8)
OURS, THEIRS = "engine", "generate"

Prompts = list[list[int]]
Decoder = Callable[[Prompts, int], tuple[float, Prompts]]
"""From prompts and a number of tokens to seconds and outputs."""


def main() -> None:
    """Print tokens per second and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default=AUTO, choices=[AUTO, "bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's own choice")
    parser.add_argument("--compile", action="store_true", help="the engine with torch.compile")
    parser.add_argument(
        "--vllm", choices=["eager", "compiled"], help="measure vLLM too; compiled: its own default, minutes to start"
    )
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    config = settled(TargetConfig(model=options.target, dtype=options.dtype))
    target = load_target(config)
    ids = [_prompt(target, text) for text in PROMPTS]
    longest = max(map(len, ids)) + options.tokens
    with ExitStack() as stack:
        decoders = {OURS: _engine(target, longest, options.compile), THEIRS: _generate(target, config)}
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        if options.vllm:
            server, version = stack.enter_context(_vllm(config, longest, options.vllm == "eager"))
            decoders[f"vLLM ({options.vllm})"] = server
            versions += f", vLLM {version}"
        print(f"{options.target} {config.dtype}, {target.device}, {versions}, {torch.get_num_threads()} threads")
        for batch in BATCHES:
            _compare(decoders, ids[:batch], options.tokens, options.repeats)


def _compare(decoders: dict[str, Decoder], prompts: Prompts, tokens: int, repeats: int) -> None:
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    outputs: dict[str, Prompts] = {}
    names = list(decoders)
    for repeat in range(repeats + 1):
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            seconds, outputs[name] = decoders[name](prompts, tokens)
            if repeat:  # the first is a warm-up
                speeds[name].append(len(prompts) * tokens / seconds)
    print(f"batch {len(prompts)}:")
    for name, found in speeds.items():
        line = f"  {name}: {statistics.median(found):.1f} tok/s"
        if name != OURS:
            ratios = [ours / theirs for ours, theirs in zip(speeds[OURS], found, strict=True)]
            same = sum(a == b for a, b in zip(outputs[OURS], outputs[name], strict=True))
            line += f"; engine / {name} {_spread(ratios)}, {same} of {len(prompts)} outputs the same"
        print(line)


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _prompt(target: TargetModel, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return list(target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _engine(target: TargetModel, longest: int, compiled: bool) -> Decoder:
    engines = {size: Engine(target, max_batch=size, max_length=longest, compile=compiled) for size in BATCHES}

    def decode(prompts: Prompts, tokens: int) -> tuple[float, Prompts]:
        start = time.perf_counter()
        done = engines[len(prompts)].generate([Request(str(i), ids, tokens) for i, ids in enumerate(prompts)])
        return time.perf_counter() - start, [completion.tokens for completion in done]

    return decode


def _generate(target: TargetModel, config: TargetConfig) -> Decoder:
    """transformers as its users run it: its own attention (SDPA) and cache, the same weights."""
    dtype = getattr(torch, config.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(server_target(config), dtype=dtype).to(target.device).eval()

    @torch.inference_mode()
    def decode(prompts: Prompts, tokens: int) -> tuple[float, Prompts]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
        start = time.perf_counter()
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        return time.perf_counter() - start, out[:, longest:].tolist()

    return decode


@contextmanager
def _vllm(config: TargetConfig, longest: int, eager: bool) -> Iterator[tuple[Decoder, str]]:
    """A server process, and its version."""
    options = vllm_options(server_target(config), config.dtype, longest, max(BATCHES))
    options["enforce_eager"] = eager
    variables = server_variables()
    if not eager:
        del variables["TORCHDYNAMO_DISABLE"]
    worker = Path(__file__).with_name("vllm_timed.py")
    command = [str(vllm_environment().python), "-P", str(worker), json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables) as server:

        def answer() -> dict[str, Any]:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line:
                raise UserError("vLLM ended without an answer; what it said stands above")
            found: dict[str, Any] = json.loads(line)
            return found

        def decode(prompts: Prompts, tokens: int) -> tuple[float, Prompts]:
            assert server.stdin is not None
            print(json.dumps({"prompts": prompts, "tokens": tokens}), file=server.stdin, flush=True)
            found = answer()
            return found["seconds"], found["outputs"]

        try:
            yield decode, answer()["vllm"]
        finally:
            server.terminate()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
