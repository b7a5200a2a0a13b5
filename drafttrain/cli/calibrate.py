"""`drafttrain calibrate RUN|TARGET --kind KIND`: shape trees and find sub-layers to skip, for a suite to refer to."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.cli.common import Subparsers, add_prompts, positive, progress_bars, run_folder

if TYPE_CHECKING:
    from drafttrain.engine.calibration_file import SkipFile, TreeFile
    from drafttrain.recipe.schema import Recipe
    from drafttrain.targets.config import TargetConfig

PROMPTS = "data/prompts/train.jsonl"
_EPILOG = """kinds:
  skip         attentions and MLPs that the target leaves out when it drafts for itself; nothing is trained
  medusa-tree  the nodes most likely to be accepted, from the accuracies of Medusa heads
  sequoia      the fastest tree on this machine for any trained draft, by dynamic programming

examples:
  drafttrain calibrate smollm2-135m --kind skip --out skip.json
  drafttrain calibrate runs/smollm2-eagle3 --kind sequoia --batch 1
  drafttrain eval runs/smollm2-eagle3 --suite eval/suites/core.yaml 'trees=[{file: runs/smollm2-eagle3/sequoia.json}]'
  drafttrain eval runs/smollm2-eagle3 --suite eval/suites/core.yaml 'drafts=[{skip: skip.json}]'
"""


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "calibrate",
        help="find the tree of a draft, or the sub-layers a target can skip",
        description="Measure on a calibration set and write a small JSON file that a suite refers to.",
        epilog=_EPILOG,
    )
    parser.add_argument("source", metavar="RUN|TARGET", help="a run or its recipe; for skip a model will do")
    parser.add_argument("overrides", nargs="*", metavar="target.key=value", help="such as target.dtype=float32")
    parser.add_argument("--kind", required=True, choices=["skip", "medusa-tree", "sequoia"], help="see below")
    add_prompts(parser, PROMPTS)
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="of an answer (64)")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="rows the tree is to be fast for (1)")
    parser.add_argument("--nodes", type=positive, metavar="N", help="size of the tree; default: the fastest here")
    parser.add_argument("--depth", type=positive, default=6, metavar="N", help="deepest level tried (6)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="that sequoia counts at (0)")
    parser.add_argument(
        "--evaluations",
        type=positive,
        default=200,
        metavar="N",
        help="of the search for skip; at least four a block (200)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the search and of sampling (0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN/KIND.json")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, write, say what was found."""
    from rich.console import Console

    from drafttrain.config import LEAST_TEMPERATURE, is_temperature
    from drafttrain.errors import UserError

    if not is_temperature(arguments.temperature):
        raise UserError(
            f"is {arguments.temperature}",
            where="--temperature",
            remedy=f"0 means greedy; otherwise it is at least {LEAST_TEMPERATURE:g}",
        )
    recipe, config = _source(arguments)
    if recipe is None and arguments.kind != "skip":
        raise UserError(
            f"is no run, and {arguments.kind} measures a trained draft",
            where=arguments.source,
            remedy="give a run's folder, or the recipe that it was trained from",
        )

    from drafttrain.bench.calibrate import CalibrationOptions, calibrate, calibration_requests
    from drafttrain.drafters.saving import check_target, find_draft, load_draft
    from drafttrain.engine.calibration_file import write_calibration
    from drafttrain.engine.tree import MAX_NODES
    from drafttrain.targets.load import load_target

    if arguments.nodes is not None and arguments.nodes > MAX_NODES:
        raise UserError(f"is {arguments.nodes}", where="--nodes", remedy=f"a tree has at most {MAX_NODES}")
    console = Console(highlight=False)
    home = Path() if recipe is None else run_folder(arguments.source, recipe)
    folder = None if arguments.kind == "skip" else find_draft(home)
    out = arguments.out or home / f"{arguments.kind}.json"
    # Before the measurement, not behind it.
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        what = "cannot be written to" if out.parent.is_dir() else "there is no such folder"
        raise UserError(what, where=out.parent, remedy="give another place by --out")
    target = load_target(config)
    drafter = None
    if folder is not None:
        drafter, meta = load_draft(folder, target.device, target.dtype)
        check_target(meta, target.identity.to_dict(), where=folder)
        drafter.bind(target.embedding_weight, target.head())
    kwargs = None if recipe is None else recipe.data.template_kwargs
    requests = calibration_requests(target, arguments.prompts, arguments.count, arguments.max_new_tokens, kwargs)
    options = CalibrationOptions(
        temperature=arguments.temperature,
        batch=arguments.batch,
        nodes=arguments.nodes,
        depth=arguments.depth,
        evaluations=arguments.evaluations,
        seed=arguments.seed,
    )
    with progress_bars(console) as tell:
        found = calibrate(target, arguments.kind, drafter, requests, options, tell)
    write_calibration(out, found)
    console.print(_summary(found))
    console.print(f"written: {out}", soft_wrap=True, markup=False)
    return 0


def _source(arguments: argparse.Namespace) -> tuple[Recipe | None, TargetConfig]:
    """The recipe of a run, or None of a model, which may be a folder too; and the target, overrides applied."""
    from drafttrain.recipe.load import load_recipe, load_target_config
    from drafttrain.recipe.schema import RESOLVED

    source = Path(arguments.source)
    if source.suffix in (".yaml", ".yml") or (source / RESOLVED).is_file():
        recipe = load_recipe(source, arguments.overrides)
        return recipe, recipe.target
    return None, load_target_config(arguments.source, arguments.overrides)


def _summary(found: TreeFile | SkipFile) -> str:
    from drafttrain.engine.calibration_file import SkipFile

    measured = found.measured
    if isinstance(found, SkipFile):
        pays = "" if measured["speedup"] > 1 else ": it does not pay"
        return (
            f"left out: attention of {len(found.attention)} blocks {list(found.attention)}, "
            f"MLP of {len(found.mlp)} {list(found.mlp)}\n"
            f"writes {measured['agreement']:.1%} of the target's tokens at {measured['cost']:.0%} of its weights; "
            f"{measured['speedup']:.2f}x expected with k={measured['k']}{pays}"
        )
    shape = found.shape
    return f"{found.kind}: {shape.nodes} nodes, depth {shape.depth}; {measured['tokens']:.2f} tokens a round expected"
