"""Plain decoding of the bundled engine against `generate` of transformers, batch 1 and 8, in one process.

    python eval/decode_speed.py                          # the embedded target, bfloat16
    python eval/decode_speed.py --repeats 5 --threads 2

Both decode greedily from the same prompts for the same number of tokens (no stop token), in turns; the ratio is taken
pair by pair and its median printed with the range. Decoding only is compared, prefill included on both sides.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from drafttrain.engine.engine import Engine
from drafttrain.engine.records import Request
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import load_target
from drafttrain.targets.model import TargetModel

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


def main() -> None:
    """Print tokens per second and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's own choice")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    target = load_target(TargetConfig(model=options.target, dtype=options.dtype))
    theirs = _reference(target, options.target, options.dtype)
    ids = [_prompt(target, text) for text in PROMPTS]
    threads = torch.get_num_threads()
    print(f"{options.target} {options.dtype}, {target.device}, torch {torch.__version__}, {threads} threads")
    for batch in (1, 8):
        pairs = []
        for repeat in range(options.repeats + 1):
            ours_s, our_tokens = _ours(target, ids[:batch], options.tokens)
            theirs_s, their_tokens = _theirs(theirs, ids[:batch], options.tokens)
            if repeat:  # the first is a warm-up
                pairs.append((batch * options.tokens / ours_s, batch * options.tokens / theirs_s))
        ratios = sorted(a / b for a, b in pairs)
        same = sum(a == b for a, b in zip(our_tokens, their_tokens, strict=True))
        print(
            f"batch {batch}: engine {statistics.median(a for a, _ in pairs):.1f} tok/s, "
            f"generate {statistics.median(b for _, b in pairs):.1f} tok/s, "
            f"ratio {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}), "
            f"{same} of {batch} outputs the same"
        )


def _reference(target: TargetModel, name: str, dtype: str) -> Any:
    """transformers as its users run it: its own attention (SDPA) and cache, the same weights."""
    source = target.hf.config._name_or_path if name != "smollm2-135m" else _embedded()
    return AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).to(target.device).eval()


def _embedded() -> str:
    from drafttrain.targets.embedded import embedded_folder

    return str(embedded_folder())


def _prompt(target: TargetModel, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return list(target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _ours(target: TargetModel, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    engine = Engine(target, max_batch=len(prompts), max_length=max(map(len, prompts)) + tokens)
    start = time.perf_counter()
    done = engine.generate([Request(str(i), prompt, tokens) for i, prompt in enumerate(prompts)])
    return time.perf_counter() - start, [completion.tokens for completion in done]


@torch.inference_mode()
def _theirs(model: Any, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    start = time.perf_counter()
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    return time.perf_counter() - start, out[:, longest:].tolist()


if __name__ == "__main__":
    main()
