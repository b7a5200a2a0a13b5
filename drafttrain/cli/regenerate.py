"""`drafttrain regenerate RECIPE [key=value ...]`: answers by the target to a recipe's prompts."""

from __future__ import annotations

import argparse

from drafttrain.cli.common import (
    Subparsers,
    add_recipe,
    chat_of,
    progress_bars,
    recipe_of,
    target_when_needed,
)


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "regenerate",
        help="have the target answer them, here or on a server",
        description="Answer the recipe's prompts as `data.answers` says, into the run's folder, where `train` finds "
        "them. What is answered already is kept: after a kill, the same command goes on.",
    )
    add_recipe(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer what is not answered yet. 1 if prompts are left without an answer."""
    recipe = recipe_of(arguments)

    from collections import Counter

    from rich.console import Console

    from drafttrain.errors import DataError
    from drafttrain.recipe.conversations import ConversationFiles, answer_prompts

    if recipe.data.path is not None:
        raise DataError(
            "the recipe reads conversations that are answered already",
            where="data.path",
            remedy="give data.prompts in its place",
        )
    console = Console()
    with progress_bars(console) as progress:
        report = answer_prompts(recipe, chat_of(recipe), target_when_needed(recipe, console), progress)
    for reason, count in Counter(reject.reason for reject in report.rejects).most_common():
        console.print(f"no answer for {count}: {reason}", markup=False)
    console.print(
        f"{report.written} answers written, {report.resumed} kept: {report.path}", soft_wrap=True, markup=False
    )
    if report.rejects:
        console.print(f"listed in {ConversationFiles.of(recipe).unanswered}", soft_wrap=True, markup=False)
    return 1 if report.rejects else 0
