"""`drafttrain push EXPORT REPO`: share an export on a hub."""

from __future__ import annotations

import argparse
from pathlib import Path

from drafttrain.cli.common import Subparsers


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "push",
        help="send an export, with its card, to a hub repository",
        description="Send a folder of `drafttrain export` in one commit. The token is read from HF_TOKEN alone. "
        "Refused are folders in which the doctor finds errors, paths of this machine, and secrets.",
    )
    parser.add_argument("export", metavar="EXPORT", type=Path, help="a folder written by `drafttrain export`")
    parser.add_argument("repo", metavar="REPO", help="OWNER/NAME; is made if it does not exist")
    parser.add_argument("--base-model", metavar="NAME", help="the target's name on the hub, in place of its path here")
    parser.add_argument("--private", action="store_true", help="make the repository private, if it is made")
    parser.add_argument("--dry-run", action="store_true", help="print exactly what would be sent, and send nothing")
    parser.add_argument("--force", action="store_true", help="in spite of all that is refused but secrets")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Plan, show, send."""
    import difflib

    from rich.console import Console

    from drafttrain.export.hub.push import plan_push, push

    console = Console(soft_wrap=True, highlight=False, markup=False)
    plan = plan_push(
        arguments.export,
        arguments.repo,
        private=arguments.private,
        base_model=arguments.base_model,
        force=arguments.force,
    )
    kind = " (private, if it is made)" if plan.private else ""
    console.print(f"{len(plan.files)} files, {plan.size:,} bytes, to {plan.repo}{kind}")
    for file in plan.files:
        console.print(
            f"  {file.name}  {file.size:,} bytes  sha256 {file.sha256}{'' if file.text is None else '  changed'}"
        )
    for name in plan.left_out:
        console.print(f"  not sent: {name}")
    for warning in plan.warnings:
        console.print(f"warning: {warning}")
    for file in plan.files:
        if file.text is not None:
            before = file.source.read_text(encoding="utf-8").splitlines()
            lines = difflib.unified_diff(before, file.text.splitlines(), file.name, file.name, lineterm="", n=0)
            console.print("\n".join(lines))
    if arguments.dry_run:
        console.print("nothing was sent")
        return 0
    console.print(f"sent to {push(plan)}")
    return 0
