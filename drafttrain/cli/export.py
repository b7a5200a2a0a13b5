"""`drafttrain export RUN --to vllm,sglang`: folders that serving engines load."""

from __future__ import annotations

import argparse
from pathlib import Path

from drafttrain.cli.common import Subparsers, positive
from drafttrain.files import size_text

_ENGINES = (
    "vllm, speculators (vLLM), sglang, trtllm (TensorRT-LLM), hf (transformers), gguf (llama.cpp); or ENGINE@VERSION"
)


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "export",
        help="write the draft in the form that a serving engine loads",
        description="Write a folder for each engine: safetensors, config.json, and a README.md with how the draft was "
        "trained, what it was measured at and the command that serves it. What is written is read back and compared. "
        "An option that an engine lacks is refused by name. The target's weights are not read, but for its output head "
        "where Medusa heads read that one.",
    )
    parser.add_argument("folder", metavar="RUN", help="a run's folder (its best draft is taken), or a draft's folder")
    parser.add_argument("--to", required=True, metavar="ENGINE[,ENGINE]", help=_ENGINES)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write DIR/ENGINE; default: RUN/export/ENGINE")
    parser.add_argument("--k", type=positive, metavar="K", help="draft tokens a round in the serving command")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="of the weights; default: the target's"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace exports that are there, each once the new one is whole"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Export, and show what was converted and how to serve it."""
    import torch
    from rich.console import Console

    from drafttrain.export.forecast import describe
    from drafttrain.export.write import export_draft

    console = Console(soft_wrap=True, highlight=False)
    engines = [name.strip() for name in arguments.to.split(",") if name.strip()]
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    done = export_draft(
        arguments.folder, engines, arguments.out, k=arguments.k, dtype=dtype, overwrite=arguments.overwrite
    )
    for written in done:
        console.print(written.engine, style="bold", end=": ")
        console.print(f"{written.folder} ({size_text(written.nbytes)}, read back)", markup=False)
        for note in written.notes:
            console.print(f"  {note}", markup=False)
        for line in [] if written.expected is None else describe(written.expected, written.engine):
            console.print(f"  {line}", markup=False)
        console.print(written.command, markup=False)
    return 0
