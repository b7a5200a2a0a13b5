"""`drafttrain import FOLDER --target TARGET -o RUN`: drafts made elsewhere, to evaluate, train further and export."""

from __future__ import annotations

import argparse
from pathlib import Path

from drafttrain.cli.common import Subparsers
from drafttrain.files import size_text

_EPILOG = """RUN holds the draft and a recipe for it. Then:

  drafttrain eval RUN --suite eval/suites/core.yaml
  drafttrain train RUN training.lr=1e-4          trains it further, into RUN-tuned; its vocabulary map is kept
  drafttrain export RUN --to vllm

examples:
  drafttrain import /models/EAGLE3-LLaMA3.1-8B --target meta-llama/Llama-3.1-8B-Instruct -o runs/eagle3
  drafttrain import /models/medusa-vicuna --target lmsys/vicuna-7b-v1.3 --format medusa-original -o runs/medusa
"""


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "import",
        help="take in a draft made elsewhere: EAGLE, SpecForge, speculators, Medusa, an engine's folder",
        description="Read a draft that another tool made, or an export, and write it as a run's folder. Its layout is "
        "told by its tensors and config.json. What is not understood is an error: nothing is dropped silently. The "
        "target's weights are not loaded; nothing is unpickled but tensors.",
        epilog=_EPILOG,
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="with config.json and weights")
    parser.add_argument("--target", metavar="MODEL", help="what it was made for; default: what the folder names")
    parser.add_argument(
        "--format",
        default="auto",
        help="eagle, eagle3, speculators, medusa, medusa-original, causal-lm, gguf; default: auto",
    )
    parser.add_argument("--taps", metavar="TAP,TAP", help="states an EAGLE-3 draft reads, where the folder is wrong")
    parser.add_argument("-o", "--out", required=True, type=Path, metavar="RUN", help="a folder that does not exist yet")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Import, and show what was converted."""
    from rich.console import Console

    from drafttrain.export.foreign.read import read_foreign
    from drafttrain.export.foreign.to_run import check_new, write_run
    from drafttrain.targets.config import TargetConfig

    console = Console(soft_wrap=True, highlight=False)
    check_new(arguments.out)
    target = None if arguments.target is None else TargetConfig(model=arguments.target)
    taps = None
    if arguments.taps is not None:
        taps = [tap.strip() for tap in arguments.taps.split(",") if tap.strip()]
    found = read_foreign(arguments.folder, target, layout=arguments.format, taps=taps)
    written = write_run(found, TargetConfig(model=str(found.ir.target["name"])), arguments.out)
    ir = found.ir
    size = f"{size_text(ir.nbytes)}, {str(ir.dtype).removeprefix('torch.')}"
    console.print(str(written.folder), style="bold", markup=False, end=": ")
    console.print(f"{ir.family} for {ir.target['name']}, from {found.layout} ({size})")
    for note in found.notes:
        console.print(f"  {note}", markup=False)
    return 0
