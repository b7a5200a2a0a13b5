"""`drafttrain train RECIPE [key=value ...]`: prompts, answers, features, training, saved draft."""

from __future__ import annotations

import argparse

from drafttrain.cli.common import Subparsers, add_recipe, recipe_of

STOPPED = 143
"""Exit status of a run that saved and stopped on SIGTERM: 128 + 15, as schedulers expect."""


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "train",
        help="train a draft from a recipe",
        description="Run every stage of a recipe that is not done yet, and train the draft. "
        "Several processes: accelerate launch --config_file recipes/accelerate/ddp.yaml drafttrain/train.py RECIPE",
    )
    add_recipe(parser)
    parser.add_argument(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto: go on from the newest whole checkpoint (default); never: set an earlier run aside; "
        "PATH: a checkpoint folder",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Train; 0 when finished, 143 when a signal stopped it after saving."""
    recipe = recipe_of(arguments)

    from drafttrain.cli.output import lasting_console
    from drafttrain.training.run import resume_from, train_recipe

    result = train_recipe(recipe, resume_from(arguments.resume), lasting_console())
    return 0 if result.finished else STOPPED
