"""`drafttrain doctor DRAFT --target TARGET`: what is wrong with a draft before, or after, it serves nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.cli.common import Subparsers

if TYPE_CHECKING:
    from rich.console import Console

    from drafttrain.export.doctor.case import Case
    from drafttrain.export.doctor.finding import Finding
    from drafttrain.export.doctor.report import Report

_EPILOG = """Exit status: 0 nothing wrong, 1 an error was found (of a mended copy: is left), 2 could not be examined.

examples:
  drafttrain doctor runs/smollm2-eagle3/export/vllm --target smollm2-135m
  drafttrain doctor ~/downloads/some-eagle3 --target /models/llama --static --json
  drafttrain doctor ~/downloads/some-eagle3 --target /models/llama --fix ~/mended
"""


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="find what is wrong with a draft: ours or anyone's, as a server will load it",
        description="Examine a draft's folder in any layout (drafttrain, EAGLE, SpecForge, speculators, Medusa): its "
        "config, the shapes and values of its tensors, and how they fit the target and the engine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("draft", metavar="DRAFT", type=Path, help="a folder as a serving engine loads it")
    parser.add_argument("--target", required=True, metavar="MODEL", help="the model that it is to draft for")
    parser.add_argument("--engine", choices=["vllm", "sglang"], default="vllm", help="that is to serve it (vllm)")
    parser.add_argument("--fix", type=Path, metavar="OUT", help="write a mended copy there and examine that")
    parser.add_argument("--ignore", default="", metavar="RULE[,RULE]", help="rules to leave out, by id")
    parser.add_argument("--json", action="store_true", help="print JSON for machines instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examine, show, mend."""
    from rich.console import Console

    from drafttrain.errors import UserError
    from drafttrain.export.doctor.case import Case
    from drafttrain.export.doctor.draft import open_draft
    from drafttrain.export.doctor.registry import check_ignored, lint
    from drafttrain.export.doctor.report import Report
    from drafttrain.export.doctor.target import read_target
    from drafttrain.export.sidecar import read_sidecar
    from drafttrain.targets.config import TargetConfig

    ignored = [word.strip() for word in arguments.ignore.split(",") if word.strip()]
    check_ignored(ignored)
    if arguments.fix is not None and arguments.fix.exists():
        raise UserError("already exists", where=arguments.fix, remedy="give --fix another folder, or remove this one")
    draft = open_draft(arguments.draft)
    facts = read_target(TargetConfig(model=arguments.target))
    case = Case(draft, facts, arguments.engine, read_sidecar(arguments.draft))
    report = Report(arguments.draft, arguments.target, arguments.engine, draft.family, lint(case, ignored))
    if arguments.fix is not None:
        _mend(case, report, arguments.fix, ignored)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    else:
        _show(Console(soft_wrap=True, highlight=False), report)
    return report.status


def _mend(case: Case, report: Report, out: Path, ignored: list[str]) -> None:
    """Write a mended copy, unless nothing can be mended."""
    from drafttrain.export.doctor.mending import mend_case, relint, write_copy

    found = mend_case(case, ignored=ignored)
    report.mended, report.left = found.mended, found.left
    if found.mended:
        write_copy(found.case.draft, out)
        report.copy, report.left = out, relint(case, out, ignored)


def _show(console: Console, report: Report) -> None:
    console.print(f"{report.draft}: {report.family or 'not recognised'}, for {report.target} in {report.engine}")
    _table(console, report.findings)
    if report.mended is None:
        fixable = sum(finding.fixable for finding in report.findings)
        if fixable:
            console.print(f"{fixable} of {len(report.findings)} can be mended: --fix OUT writes a mended copy")
    elif report.copy is None:
        console.print("nothing here can be mended without a person: no copy was written")
    else:
        console.print(f"mended in {report.copy}: {', '.join(finding.rule for finding in report.mended)}")
        if report.left:
            console.print("left in the copy:")
            _table(console, report.left)
    console.print("[bold red]errors[/bold red]" if report.status else "[green]no errors[/green]")


def _table(console: Console, findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    if not findings:
        return
    table = Table("", "rule", "what", "why it matters", "remedy", show_lines=True)
    styles = {"error": "bold red", "warning": "yellow", "note": "dim"}
    for finding in findings:
        cells = (finding.rule, finding.what, finding.why, finding.remedy + (" [--fix]" if finding.fixable else ""))
        mark = Text(str(finding.severity), style=styles[str(finding.severity)])
        # Not as markup: messages hold lists in brackets.
        table.add_row(mark, *(Text(cell) for cell in cells))
    console.print(table)
