"""`drafttrain plan RECIPE [key=value ...]`: what a run will take, before anything is loaded."""

from __future__ import annotations

import argparse
from pathlib import Path

from drafttrain.cli.common import Subparsers, add_recipe, recipe_of


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "plan",
        help="parameters, FLOPs, disk, memory and hours of a recipe",
        description="Count what a recipe will take on given hardware, from configs alone, and say whether it fits. "
        "Exits with 1 when it does not. Estimates and assumptions are named as such.",
    )
    add_recipe(parser)
    parser.add_argument("--gpus", metavar="8xH100-80G", help="GPUs of a node; default: this machine")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="nodes of such GPUs (default 1)")
    parser.add_argument(
        "--target-config", type=Path, metavar="FILE", help="the target's config.json, where it cannot be reached"
    )
    parser.add_argument("--samples", type=int, metavar="N", help="training samples, where the data is not here yet")
    parser.add_argument("--tokens", type=int, metavar="N", help="mean tokens of a sample")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the plan; 1 when it does not fit."""
    from rich.console import Console

    from drafttrain.errors import UserError
    from drafttrain.training.plan.hardware import parse_gpus, this_machine
    from drafttrain.training.plan.plan import make_plan, target_config
    from drafttrain.training.plan.show import plan_tables

    if arguments.nodes < 1:
        raise UserError(f"{arguments.nodes} nodes cannot train", where="--nodes", remedy="give the number of machines")
    for name in ("samples", "tokens"):
        value = getattr(arguments, name)
        if value is not None and value < 2:
            raise UserError(f"{value} is too few", where=f"--{name}", remedy="give at least 2")
    if arguments.nodes > 1 and arguments.gpus is None:
        raise UserError("says nothing without GPUs", where="--nodes", remedy="add --gpus 8xH100-80G")
    # All GPUs that it knows compute in bfloat16.
    recipe = recipe_of(arguments, None if arguments.gpus is None else lambda _: "bfloat16")
    hardware = this_machine() if arguments.gpus is None else parse_gpus(arguments.gpus, arguments.nodes)
    text = target_config(recipe, arguments.target_config)
    plan = make_plan(recipe, text, hardware, samples=arguments.samples, tokens=arguments.tokens)
    Console().print(plan_tables(plan))
    return 0 if plan.fits else 1
