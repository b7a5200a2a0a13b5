"""What training says a draft is worth against what the engine measures, on the same answers.

    python eval/parity.py runs/smollm2-eagle3 --limit 16 --max-new-tokens 64

The target answers the first turn of each prompt greedily in fp32. The trained draft is unrolled over those answers as
the trainer unrolls it, and rounds of K drafts are played through on paper: accepted while its argmax is the next
token. The engine serves the same prompts. Both must give the same rounds: a difference is a fault between
trainer and engine, a low acceptance in both is a draft that has not learnt such answers.
For feature drafts (EAGLE, Medusa).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from drafttrain.bench.suite import load_suite
from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.build import serving_copy
from drafttrain.drafters.saving import find_draft, load_draft
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import build_proposer
from drafttrain.engine.records import Completion, Request
from drafttrain.features.sources import OnlineFeatures
from drafttrain.recipe.load import load_recipe
from drafttrain.targets.load import load_target
from drafttrain.targets.model import TargetModel


def main() -> None:
    """Print both, exit with 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a training run")
    parser.add_argument("--suite", default="eval/suites/core.yaml")
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--k", type=int, default=4)
    options = parser.parse_args()
    recipe = load_recipe(options.run)
    target = load_target(recipe.target.model_copy(update={"dtype": "float32"}))
    drafter, _ = load_draft(find_draft(options.run), target.device, torch.float32)
    drafter.bind(target.embedding_weight, target.head())
    chat = ChatRenderer(target.tokenizer, recipe.data.template_kwargs, target.stop_ids)
    requests = [
        Request(
            prompt.id,
            chat.prompt_ids([{"role": "user", "content": prompt.turns[0]}]),
            options.max_new_tokens,
            stop_ids=target.stop_ids,
        )
        for prompt in load_suite(options.suite, [f"limit={options.limit}"]).load_prompts()
    ]
    longest = max(len(request.prompt_ids) for request in requests) + options.max_new_tokens
    answers = Engine(target, max_batch=8, max_length=longest).generate(requests)
    engine = Engine(target, build_proposer(serving_copy(drafter, torch.float32)), k=options.k, max_length=longest)
    engine.generate(requests)
    served = {request.id: [r.accepted for r in engine.records if r.request == request.id] for request in requests}
    trained = {
        request.id: rounds_on_paper(target, drafter, request, answer, options.k)
        for request, answer in zip(requests, answers, strict=True)
    }
    for name, rounds in (("as trained", trained), ("as served", served)):
        accepted = [kept for row in rounds.values() for kept in row]
        first = sum(kept > 0 for kept in accepted) / len(accepted)
        print(
            f"{name}: {len(accepted)} rounds, {sum(accepted)} drafts accepted, at depth 1 in {first:.3f} of the rounds"
        )
    differing = [name for name in trained if trained[name] != served[name]]
    print(f"the same rounds in {len(trained) - len(differing)} of {len(trained)} answers")
    raise SystemExit(bool(differing))


@torch.no_grad()
def rounds_on_paper(target: TargetModel, drafter: Drafter, request: Request, answer: Completion, k: int) -> list[int]:
    """Drafts accepted in each round of one answer, from the unrolled draft alone."""
    prompt = len(request.prompt_ids)
    ids = np.array([*request.prompt_ids, *answer.tokens], dtype=np.int32)
    last = len(ids) - 1
    sample = Sample(request.id, ids, ((prompt, last),))
    batch = OnlineFeatures(target, drafter.feature_spec).batch([[sample]], target.device)
    guesses = [
        drafter.vocab_map.to_target(drafter.head(out.depth)(out.readout[0]).argmax(-1)).tolist()
        for out in drafter.eval().unroll(batch, k)
    ]
    rounds, root = [], prompt
    while root < last:
        # Slot root - 1 holds the root; at depth d it predicts the token d + 1 behind it.
        room = min(k, prompt + request.max_new_tokens - root - 2)
        kept = 0
        while kept < room and root + 1 + kept <= last and guesses[kept][root - 1] == ids[root + 1 + kept]:
            kept += 1
        rounds.append(kept)
        root += kept + 1
    return rounds


if __name__ == "__main__":
    main()
