"""What a lookup, a trained draft and a router between them are worth, played through on the target's answers.

    python eval/router_on_paper.py runs/smollm2-eagle3 --max-new-tokens 128

The target answers the first turn of each prompt greedily. At every place of an answer the draft's chain comes from one
unrolled pass, as in `eval/parity.py`, and the lookups' from the proposers themselves; rounds follow from both without
an engine. Gives tau by category: acceptance alone, no time. For drafts that predict features (EAGLE).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from drafttrain.bench.suite import load_suite
from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.saving import find_draft, load_draft
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import NGramProposer, Row, SuffixProposer
from drafttrain.engine.proposers.lookup import Found, Lookup
from drafttrain.engine.records import Request
from drafttrain.features.sources import OnlineFeatures
from drafttrain.recipe.load import load_recipe
from drafttrain.targets.load import load_target
from drafttrain.targets.model import TargetModel

Choice = Callable[[int], Sequence[int]]
"""Place of the root in a text -> tokens proposed behind it."""


def main() -> None:
    """Print tau of each way, pooled and by category."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a training run")
    parser.add_argument("--suite", default="eval/suites/core.yaml")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--k", type=int, default=4, help="tokens of the draft's chain")
    parser.add_argument("--longest", type=int, default=12, help="most tokens of a lookup's chain in a router")
    options = parser.parse_args()
    recipe = load_recipe(options.run)
    target = load_target(recipe.target)
    drafter, _ = load_draft(find_draft(options.run), target.device, target.dtype)
    drafter.bind(target.embedding_weight, target.head())
    chat = ChatRenderer(target.tokenizer, recipe.data.template_kwargs, target.stop_ids)
    prompts = load_suite(options.suite, [] if options.limit is None else [f"limit={options.limit}"]).load_prompts()
    requests = [
        Request(
            prompt.id,
            chat.prompt_ids([{"role": "user", "content": prompt.turns[0]}]),
            options.max_new_tokens,
            stop_ids=target.stop_ids,
        )
        for prompt in prompts
    ]
    longest = max(len(request.prompt_ids) for request in requests) + options.max_new_tokens
    answers = Engine(target, max_batch=8, max_length=longest).generate(requests)
    counts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for prompt, request, answer in zip(prompts, requests, answers, strict=True):
        guesses = unrolled(target, drafter, request.prompt_ids, answer.tokens, options.k)
        ways = choices(request.prompt_ids, answer.tokens, guesses, options.k, options.longest)
        for name, choice in ways.items():
            rounds, emitted = play(request.prompt_ids, answer.tokens, choice)
            for category in ("all", prompt.category):
                counts[name][category][0] += rounds
                counts[name][category][1] += emitted
    for name, by_category in counts.items():
        taus = {category: emitted / rounds for category, (rounds, emitted) in by_category.items() if rounds}
        print(f"{name:24s}", "  ".join(f"{category} {tau:.2f}" for category, tau in taus.items()))


@torch.no_grad()
def unrolled(target: TargetModel, drafter: Drafter, prompt: list[int], answer: list[int], k: int) -> list[list[int]]:
    """The draft's token at each depth, by place from the first root on."""
    ids = np.array([*prompt, *answer], dtype=np.int32)
    sample = Sample("answer", ids, ((len(prompt), len(ids) - 1),))
    batch = OnlineFeatures(target, drafter.feature_spec).batch([[sample]], target.device)
    return [
        drafter.vocab_map.to_target(drafter.head(out.depth)(out.readout[0]).argmax(-1)).tolist()[len(prompt) - 1 :]
        for out in drafter.eval().unroll(batch, k)
    ]


def choices(prompt: list[int], answer: list[int], guesses: list[list[int]], k: int, longest: int) -> dict[str, Choice]:
    """The ways that are compared."""
    text = [*prompt, *answer]
    first = len(prompt)

    def draft(root: int) -> list[int]:
        return [depth[root - first] for depth in guesses[:k]]

    def looked_up(lookup: Lookup, most: int) -> list[Found]:
        request = Request("a", prompt, len(answer))
        rows = (Row(request, text[: root + 1], len(answer), None) for root in range(first, len(text)))
        return [lookup.look_up([row], most)[0] for row in rows]

    short = {name: looked_up(lookup, k) for name, lookup in (("ngram", NGramProposer()), ("suffix", SuffixProposer()))}
    copied = looked_up(SuffixProposer(), longest)

    def router(root: int, least: int) -> Sequence[int]:
        found = copied[root - first]
        return found.tokens if found.match >= least and found.tokens else draft(root)

    ways: dict[str, Choice] = {"draft": draft}
    for name, found in short.items():
        ways[name] = lambda root, found=found: found[root - first].tokens  # type: ignore[misc]
    for least in (1, 2, 3, 4):
        ways[f"suffix from {least} or draft"] = lambda root, least=least: router(root, least)  # type: ignore[misc]
    return ways


def play(prompt: list[int], answer: list[int], choice: Choice) -> tuple[int, int]:
    """(rounds, emitted tokens) of one answer; its first token belongs to no round."""
    text = [*prompt, *answer]
    root, last = len(prompt), len(text) - 1
    rounds = 0
    while root < last:
        room = last - root - 1
        kept = 0
        for token in list(choice(root))[:room]:
            if token != text[root + 1 + kept]:
                break
            kept += 1
        rounds += 1
        root += kept + 1
    return rounds, last - len(prompt)


if __name__ == "__main__":
    main()
