"""A run's draft in our engine against transformers' assisted generation and prompt lookup, batch 1, greedy.

    python eval/assisted.py runs/smollm2-eagle3-more --draft-lm runs/smollm2-draft_lm
    python eval/assisted.py runs/smollm2-eagle3-more --draft-lm runs/smollm2-draft_lm --k 3 4 6 \\
        --tree '{dynamic: {depth: 5, top_k: 4, nodes: 12}}' --tree '{branching: [3, 2, 1]}' --limit 32 --repeats 5

Everybody answers the first turns of the same prompts, prompt by prompt in turns, until a stop token or the limit. Our
draft proposes chains of each K and each tree. transformers runs the trained draft LM, exported with `drafttrain export
--to hf`, with its default schedule and with K tokens a round, and prompt lookup. Requests are timed whole, prompts
included. Ratios pool all prompts: one a repeat, as median and range, and a 95 % bootstrap interval over prompts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from drafttrain.bench.bootstrap import paired_speedup_interval
from drafttrain.bench.contenders import Contenders
from drafttrain.bench.suite import SuiteConfig, load_suite
from drafttrain.corpus.chat import ChatRenderer
from drafttrain.drafters.saving import find_draft
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import Proposer
from drafttrain.engine.records import Request
from drafttrain.errors import UserError
from drafttrain.export.prove.prove import server_target
from drafttrain.export.write import export_draft
from drafttrain.files import write_json
from drafttrain.recipe.load import load_recipe
from drafttrain.recipe.provenance import hardware
from drafttrain.recipe.schema import Recipe
from drafttrain.targets.load import load_target
from drafttrain.targets.model import TargetModel

PLAIN, GENERATE = "engine", "generate"
LOOKUPS = ("engine, prompt lookup", "generate, prompt lookup")

Answer = Callable[[list[int]], list[int]]
"""From a prompt to the tokens behind it."""


@dataclass
class Timed:
    """One way of decoding.

    Attributes:
        kind: "ours" (a trained draft in our engine), "theirs" (assisted generation), "lookup" or "plain".
        seconds, tokens: by repeat, then by prompt.
    """

    kind: str
    answer: Answer
    seconds: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)

    def speeds(self) -> list[float]:
        """Tokens a second of each repeat."""
        return [sum(n) / sum(s) for n, s in zip(self.tokens, self.seconds, strict=True)]

    def by_prompt(self) -> tuple[list[float], list[float]]:
        """(tokens, seconds) of each prompt, repeats pooled."""
        return [sum(n) for n in zip(*self.tokens, strict=True)], [sum(s) for s in zip(*self.seconds, strict=True)]


def main() -> None:
    """Measure and print; the figures as JSON into --out."""
    options = _options()
    if options.repeats < 2:
        print("warning: one repeat does not show how steady the machine is; give --repeats 3", file=sys.stderr)
    if options.threads:
        torch.set_num_threads(options.threads)
    overrides = [f"target.dtype={options.dtype}"] if options.dtype else []
    recipe = load_recipe(options.run, overrides)
    suite = _suite(options)
    target = load_target(recipe.target)
    prompts = list(_prompts(target, recipe, suite))
    longest = max(map(len, prompts)) + options.max_new_tokens
    with tempfile.TemporaryDirectory() as scratch:
        ways = dict(_ours(target, recipe, suite, options.run, longest))
        ways |= dict(_theirs(target, recipe, options, Path(scratch)))
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        print(
            f"{recipe.target.model} {recipe.target.dtype}, {hardware()['cpu']}, {versions}, {torch.get_num_threads()} "
            f"threads; {len(prompts)} prompts of {suite.name}, at most {options.max_new_tokens} tokens, "
            f"{options.repeats} repeat(s)"
        )
        _measure(ways, prompts, options.repeats)
    report = _report(ways)
    if options.out:
        write_json(options.out, {"options": {k: str(v) for k, v in vars(options).items()}, **report})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the run whose draft our engine uses")
    parser.add_argument("--draft-lm", type=Path, required=True, help="folder of a trained draft LM of the same target")
    parser.add_argument("--suite", default="eval/suites/core.yaml", help="whose prompts are taken")
    parser.add_argument("--limit", type=int, default=16, help="prompts, spread over the categories")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, nargs="+", default=[4], help="lengths of our chains, and of the draft LM's")
    parser.add_argument(
        "--tree",
        action="append",
        help="a tree as in a suite's `trees`; default: {dynamic: {depth: 5, top_k: 4, nodes: 12}}; '' for none",
    )
    parser.add_argument("--lookup-tokens", type=int, default=10, help="prompt_lookup_num_tokens of transformers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's own choice")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="default: the recipe's")
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser.parse_args()


def _suite(options: argparse.Namespace) -> SuiteConfig:
    trees = ["{dynamic: {depth: 5, top_k: 4, nodes: 12}}"] if options.tree is None else options.tree
    return load_suite(
        options.suite,
        [
            f"limit={options.limit}",
            f"max_new_tokens={options.max_new_tokens}",
            f"k={options.k}",
            f"trees=[{', '.join(tree for tree in trees if tree)}]",
            "drafts=[run, ngram]",
            "temperatures=[0.0]",
            "batch=[1]",
        ],
    )


def _prompts(target: TargetModel, recipe: Recipe, suite: SuiteConfig) -> Iterator[list[int]]:
    chat = ChatRenderer(target.tokenizer, recipe.data.template_kwargs, target.stop_ids)
    for prompt in suite.load_prompts():
        yield chat.prompt_ids([{"role": "user", "content": prompt.turns[0]}])


def _ours(
    target: TargetModel, recipe: Recipe, suite: SuiteConfig, run: Path, longest: int
) -> Iterator[tuple[str, Timed]]:
    """The engine without a draft, with chains of each K, with trees, with prompt lookup."""

    def engine(proposer: Proposer | None, k: int) -> Answer:
        made = Engine(target, proposer, k=k, max_batch=1, max_length=longest)
        return lambda ids: made.generate([Request("0", ids, suite.max_new_tokens, stop_ids=target.stop_ids)])[0].tokens

    yield PLAIN, Timed("plain", engine(None, 1))
    for contender in Contenders(target, suite, (recipe.name, find_draft(run))).all():
        if contender.family == "ngram":
            yield LOOKUPS[0], Timed("lookup", engine(contender.proposer, max(suite.k)))
        elif contender.variant:
            yield f"engine, {contender.name}", Timed("ours", engine(contender.proposer, suite.k[0]))
        else:
            for k in suite.k:
                yield f"engine, {contender.name} K={k}", Timed("ours", engine(contender.proposer, k))


def _theirs(
    target: TargetModel, recipe: Recipe, options: argparse.Namespace, scratch: Path
) -> Iterator[tuple[str, Timed]]:
    """`generate` as its users run it: its own attention (SDPA) and cache, the same weights."""
    dtype = target.dtype
    model: Any = AutoModelForCausalLM.from_pretrained(server_target(recipe.target), dtype=dtype)
    model = model.to(target.device).eval()
    (exported,) = export_draft(options.draft_lm, ["hf"], scratch, dtype=dtype)
    draft: Any = AutoModelForCausalLM.from_pretrained(exported.folder, dtype=dtype).to(target.device).eval()
    common: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "do_sample": False,
        "eos_token_id": sorted(target.stop_ids),
        "pad_token_id": min(target.stop_ids),
    }

    def generate(assistant: dict[str, Any] | None = None, **more: Any) -> Answer:
        config = GenerationConfig(**common, **more)

        @torch.inference_mode()
        def answer(ids: list[int]) -> list[int]:
            tokens = torch.tensor([ids], device=model.device)
            helper: dict[str, Any] = {}
            if assistant is not None:
                # The schedule is kept in the draft's own config, which goes on from call to call.
                draft.generation_config.update(**assistant)
                helper["assistant_model"] = draft
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=config, **helper)
            return list(out[0, len(ids) :].tolist())

        return answer

    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    as_shipped = {name: getattr(draft.generation_config, name) for name in names}
    yield GENERATE, Timed("plain", generate())
    yield "generate, draft LM, its default schedule", Timed("theirs", generate(as_shipped))
    for k in options.k:
        yield (
            f"generate, draft LM K={k}",
            Timed("theirs", generate(dict(zip(names, (k, "constant", 0.0), strict=True)))),
        )
    yield LOOKUPS[1], Timed("lookup", generate(prompt_lookup_num_tokens=options.lookup_tokens))


def _measure(ways: dict[str, Timed], prompts: list[list[int]], repeats: int) -> None:
    names = list(ways)
    for way in ways.values():
        way.answer(prompts[0])  # a warm-up
    for repeat in range(repeats):
        for way in ways.values():
            way.seconds.append([])
            way.tokens.append([])
            way.outputs = []
        for number, ids in enumerate(prompts):
            shift = (repeat + number) % len(names)
            for name in names[shift:] + names[:shift]:
                start = time.perf_counter()
                tokens = ways[name].answer(ids)
                ways[name].seconds[-1].append(time.perf_counter() - start)
                ways[name].tokens[-1].append(len(tokens))
                ways[name].outputs.append(tokens)
        print(f"repeat {repeat + 1} of {repeats} done", file=sys.stderr)


def _report(ways: dict[str, Timed]) -> dict[str, Any]:
    report: dict[str, Any] = {"speeds": {}, "ratios": {}}
    for name, way in ways.items():
        speeds = way.speeds()
        same = sum(a == b for a, b in zip(way.outputs, ways[PLAIN].outputs, strict=True))
        report["speeds"][name] = {"tokens_per_second": speeds, "same_as_plain": same}
        print(
            f"{name}: {statistics.median(speeds):.1f} tok/s ({min(speeds):.1f} to {max(speeds):.1f}), "
            f"{same} of {len(way.outputs)} answers as the engine's without a draft"
        )

    def fastest(kind: str) -> str:
        return max(
            (n for n, way in ways.items() if way.kind == kind), key=lambda n: statistics.median(ways[n].speeds())
        )

    ours, theirs = fastest("ours"), fastest("theirs")
    print("ratios of tokens/s, the fastest of each kind:")
    for a, b in (
        (ours, theirs),
        *((ours, lookup) for lookup in LOOKUPS),
        (ours, PLAIN),
        (theirs, GENERATE),
        (LOOKUPS[1], GENERATE),
        (PLAIN, GENERATE),
    ):
        ratios = [x / y for x, y in zip(ways[a].speeds(), ways[b].speeds(), strict=True)]
        interval = paired_speedup_interval(*ways[a].by_prompt(), *ways[b].by_prompt())
        report["ratios"][f"{a} / {b}"] = {"by_repeat": ratios, "interval_over_prompts": interval}
        over = "" if interval is None else f", over prompts [{interval[0]:.2f}, {interval[1]:.2f}]"
        print(f"  {a} / {b}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}{over})")
    return report


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
