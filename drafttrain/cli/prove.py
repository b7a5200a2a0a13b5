"""`drafttrain prove EXPORT`: load an export in a real server and hold it against the bundled engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.cli.common import Subparsers, add_prompts, first_turns, positive

if TYPE_CHECKING:
    from rich.console import Console

    from drafttrain.export.prove.compare import Proof
    from drafttrain.recipe.schema import Recipe
    from drafttrain.targets.config import TargetConfig

RESULT = "proof.json"
_EPILOG = """The first time, an environment of its own is made for the server in the cache folder (3.4 GB).

Exit status: 0 proven, 1 not proven, 2 could not be tried.

examples:
  drafttrain prove runs/smollm2-eagle3/export/vllm
  drafttrain prove runs/smollm2-eagle3/export/vllm --dtype float32 --count 16
  drafttrain prove /models/draft-vllm --run runs/mine --target /models/target
"""


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "prove",
        help="load an export in a real server: same output, same acceptance",
        description="Replay prompts greedily in the server with the exported draft and without it. The output must be "
        "the same, near-ties aside, and acceptance at each depth must be what the bundled engine measures with the "
        "run's draft on the same prompts.",
        epilog=_EPILOG,
    )
    parser.add_argument("export", metavar="EXPORT", type=Path, help="a folder written by `drafttrain export --to vllm`")
    parser.add_argument("--engine", choices=["vllm"], default="vllm", help="the server (its CPU build)")
    parser.add_argument(
        "--run", dest="source", metavar="RUN", type=Path, help="what was exported; default: the folder around EXPORT"
    )
    parser.add_argument("--target", metavar="MODEL", help="default: the one in the run's recipe")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of target and draft; default: the recipe's")
    add_prompts(parser)
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="of an answer (64)")
    parser.add_argument("--k", type=positive, metavar="K", help="draft tokens a round; default: as in the recipe, or 4")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: EXPORT/{RESULT}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prove one export, print the comparison, write it beside the export."""
    from rich.console import Console

    from drafttrain.drafters.saving import check_target, find_draft, read_meta
    from drafttrain.export.prove.environment import vllm_environment, vllm_folder
    from drafttrain.export.prove.prove import check_export, find_run, prove_export, server_target
    from drafttrain.export.write import draft_tokens
    from drafttrain.files import write_json
    from drafttrain.recipe.load import load_recipe
    from drafttrain.recipe.schema import RESOLVED
    from drafttrain.targets.config import TargetConfig
    from drafttrain.targets.load import load_target

    console = Console(soft_wrap=True, highlight=False)
    source = find_run(arguments.export, arguments.source)
    holder = next((folder for folder in (source, source.parent) if (folder / RESOLVED).is_file()), None)
    recipe = None if holder is None else load_recipe(holder)
    named = None if recipe is None else recipe.target
    ir = check_export(
        arguments.export, source, TargetConfig(model=arguments.target) if arguments.target is not None else named
    )
    k = draft_tokens(ir, arguments.k, None if recipe is None else recipe.evaluation.k)
    config = _target_config(arguments, recipe, str(ir.target.get("name")), str(ir.dtype).removeprefix("torch."))
    place = server_target(config)
    if not vllm_folder().exists():
        console.print(f"making the server's environment in {vllm_folder()} (3.4 GB, once)", markup=False)
    environment = vllm_environment()
    console.print(f"loading the target {config.model} ({config.dtype})", markup=False)
    target = load_target(config)
    draft = find_draft(source)
    check_target(read_meta(draft), target.identity.to_dict(), where=draft)
    kwargs = {} if recipe is None else recipe.data.template_kwargs
    prompts = first_turns(target, arguments.prompts, arguments.count, kwargs)
    console.print(
        f"{len(prompts)} prompts, up to {arguments.max_new_tokens} tokens each, in the bundled engine and in vLLM"
    )
    proof = prove_export(
        ir,
        arguments.export,
        source,
        target,
        place,
        prompts,
        k=k,
        max_new_tokens=arguments.max_new_tokens,
        stop_ids=target.stop_ids,
        environment=environment,
    )
    _show(console, proof)
    out = arguments.out or arguments.export / RESULT
    write_json(out, {**proof.to_json(), "target": config.model, "prompts": arguments.prompts})
    console.print(f"written to {out}", markup=False)
    return 0 if proof.proven else 1


def _target_config(arguments: argparse.Namespace, recipe: Recipe | None, name: str, dtype: str) -> TargetConfig:
    """The recipe's target, or the one that the draft names, in the dtype asked for."""
    from drafttrain.targets.config import TargetConfig

    config = TargetConfig(model=name, dtype=dtype) if recipe is None else recipe.target
    changes = {key: getattr(arguments, key) for key in ("dtype",) if getattr(arguments, key)}
    if arguments.target:
        changes |= {"model": arguments.target, "revision": None, "gguf_file": None}
    return TargetConfig.model_validate({**config.model_dump(), **changes})


def _show(console: Console, proof: Proof) -> None:
    from rich.table import Table

    table = Table("depth", "server", "bundled engine", "99 % interval", title="accepted share of rounds")
    for position in proof.positions:
        cells = (str(position.depth), f"{position.server:.3f}", f"{position.bundled:.3f}")
        table.add_row(*cells, f"[{position.low:.3f}, {position.high:.3f}]", style=None if position.within else "red")
    console.print(table)
    server, ours = proof.server, proof.bundled
    console.print(
        f"tokens a round: server {server.mean_length:.3f} ({server.drafts} rounds), bundled engine "
        f"{ours.mean_length:.3f} ({ours.drafts} rounds){'; every count is the same' if proof.same_counts else ''}"
    )
    total = proof.setting["prompts"]
    ties = sum(d.near_tie for d in proof.differences)
    console.print(
        f"output with speculation: {total - len(proof.differences)} of {total} equal to plain greedy"
        + (f", {ties} part at a near-tie" if ties else "")
    )
    for problem in proof.problems:
        console.print(problem, style="red", markup=False)
    console.print("[green]proven[/green]" if proof.proven else "[bold red]not proven[/bold red]")
