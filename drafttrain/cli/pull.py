"""`drafttrain pull REPO`: fetch a draft that drafttrain pushed."""

from __future__ import annotations

import argparse
from pathlib import Path

from drafttrain.cli.common import Subparsers


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "pull",
        help="fetch a draft that `drafttrain push` sent",
        description="Fetch a repository into a new folder, whole or not at all. Drafts made elsewhere are refused: "
        "fetch them with any client and use `drafttrain import`. No code and no pickles are fetched. HF_TOKEN is "
        "used if it is set.",
    )
    parser.add_argument("repo", metavar="REPO", help="OWNER/NAME")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: NAME, here")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit; default: the main branch")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Fetch, and say what it is."""
    from rich.console import Console

    from drafttrain.export.hub.pull import pull
    from drafttrain.export.sidecar import read_sidecar

    out = pull(arguments.repo, arguments.out or Path(arguments.repo.rpartition("/")[2]), arguments.revision)
    about = read_sidecar(out) or {}
    target = (about.get("target") or {}).get("name")
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{out}: {about['family']} for {target}, in the form of {about['engine']}")
    console.print(f"drafttrain doctor {out} --target {target}")
    return 0
