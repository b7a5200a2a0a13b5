"""`drafttrain prompts RECIPE [key=value ...]`: collect a recipe's prompts into a JSONL file."""

from __future__ import annotations

import argparse
from pathlib import Path

from drafttrain.cli.common import Subparsers, add_recipe, chat_of, progress_bars, recipe_of, target_when_needed


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "prompts",
        help="collect the prompts of a recipe, self-written ones included",
        description="Read the recipe's prompt sources, let the target write those of source `self`, and write all "
        "as JSONL: into the run's folder, where `regenerate` and `train` find them, or into --out.",
    )
    add_recipe(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write here and leave the run's folder alone")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Collect, write, and say how many were refused and why."""
    recipe = recipe_of(arguments)

    from collections import Counter

    from rich.console import Console

    from drafttrain.recipe.conversations import ConversationFiles, collect, prepare_prompts, what_was_left_out

    console = Console()
    chat, target = chat_of(recipe), target_when_needed(recipe, console)
    if arguments.out is None:
        with progress_bars(console) as progress:
            prompts = prepare_prompts(recipe, chat, target, progress)
        path = ConversationFiles.of(recipe).prompts
        for line in what_was_left_out(recipe):
            console.print(line, markup=False, soft_wrap=True)
    else:
        from drafttrain.corpus.readers import write_prompts

        with progress_bars(console) as progress:
            found = collect(recipe, chat, target, progress)
        for reason, count in Counter(reject.reason for reject in found.rejects).most_common():
            console.print(f"refused {count}: {reason}", markup=False)
        prompts, path = found.items, arguments.out
        write_prompts(path, prompts)
    console.print(f"{len(prompts)} prompts in {path}", soft_wrap=True, markup=False)
    return 0
