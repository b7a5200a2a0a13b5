"""`drafttrain doctor DRAFT --target TARGET`: what is wrong with a draft before, or after, it serves nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafttrain.cli.common import Subparsers, add_prompts, first_turns, positive

if TYPE_CHECKING:
    from rich.console import Console

    from drafttrain.export.doctor.case import Case
    from drafttrain.export.doctor.diagnose import Trial
    from drafttrain.export.doctor.draft import RawDraft
    from drafttrain.export.doctor.finding import Finding
    from drafttrain.export.doctor.report import Report
    from drafttrain.export.prove.server import Counters
    from drafttrain.targets.config import TargetConfig

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
        description="Examine a draft's folder in any layout (drafttrain, EAGLE, SpecForge, speculators, Medusa, GGUF). "
        "First the files: config, shapes and values, and how they fit the target and the engine. Then a trial: target "
        "and draft run on a few prompts; what is accepted is compared with the draft's claim, and other readings of "
        "the folder (shifted layer ids, another rotary base or vocabulary map, ...) are tried for one that is better.",
        epilog=_EPILOG,
    )
    parser.add_argument("draft", metavar="DRAFT", type=Path, help="a folder as a serving engine loads it")
    parser.add_argument("--target", required=True, metavar="MODEL", help="the model that it is to draft for")
    parser.add_argument(
        "--engine",
        choices=["vllm", "sglang", "trtllm"],
        help="that is to serve it; default: the one that the folder was written for, else vllm",
    )
    parser.add_argument("--static", action="store_true", help="the files alone: no trial, no weights of the target")
    add_prompts(parser)
    parser.add_argument("--max-new-tokens", type=positive, default=64, metavar="N", help="of an answer (64)")
    parser.add_argument("--k", type=positive, default=4, metavar="K", help="draft tokens a round (4)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="of the trial; default: by machine")
    parser.add_argument("--fix", type=Path, metavar="OUT", help="write a mended copy there and examine its files")
    parser.add_argument("--ignore", default="", metavar="RULE[,RULE]", help="rules to leave out, by id")
    parser.add_argument("--json", action="store_true", help="print JSON for machines instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Examine, try, show, mend."""
    from rich.console import Console

    from drafttrain.errors import UserError
    from drafttrain.export.doctor.case import Case
    from drafttrain.export.doctor.diagnose import RULES
    from drafttrain.export.doctor.registry import check_ignored, lint
    from drafttrain.export.doctor.report import Report
    from drafttrain.export.doctor.target import read_target
    from drafttrain.export.sidecar import read_sidecar
    from drafttrain.targets.config import AUTO, TargetConfig
    from drafttrain.targets.native import settled

    console = Console(soft_wrap=True, highlight=False, stderr=arguments.json)
    ignored = [word.strip() for word in arguments.ignore.split(",") if word.strip()]
    check_ignored(ignored, RULES)
    if arguments.fix is not None and arguments.fix.exists():
        raise UserError("already exists", where=arguments.fix, remedy="give --fix another folder, or remove this one")
    config = settled(TargetConfig(model=arguments.target, dtype=arguments.dtype or AUTO))
    about = read_sidecar(arguments.draft)
    draft, engine = _open(arguments, config, about)
    case = Case(draft, read_target(config), engine, about)
    report = Report(arguments.draft, arguments.target, engine, draft.family, lint(case, ignored))
    if not arguments.static and can_try(case, report.findings):
        _try(arguments, console, case, report, config, ignored)
    if arguments.fix is not None:
        _mend(case, report, arguments.fix, ignored)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    else:
        _show(console, report)
    return report.status


def _open(arguments: argparse.Namespace, config: TargetConfig, about: Mapping[str, Any] | None) -> tuple[RawDraft, str]:
    """The draft, and the engine that is to serve it: llama.cpp for a GGUF file, whatever was asked for."""
    from drafttrain.errors import UserError
    from drafttrain.export.doctor.case import engine_for
    from drafttrain.export.doctor.draft import open_draft
    from drafttrain.export.doctor.gguf import ENGINE, holds_gguf, open_gguf

    if not holds_gguf(arguments.draft):
        draft = open_draft(arguments.draft)
        return draft, arguments.engine or engine_for(draft, about)
    if arguments.fix is not None:
        raise UserError(
            "a GGUF file is not mended",
            where=arguments.draft,
            remedy="mend the checkpoint that it was made from with --fix, and make the file again",
        )
    return open_gguf(arguments.draft, config), ENGINE


def can_try(case: Case, findings: list[Finding]) -> bool:
    """Whether there is a draft to run: a known family, and files that are whole."""
    return case.draft.family is not None and not any(finding.rule == "incomplete" for finding in findings)


def _try(
    arguments: argparse.Namespace,
    console: Console,
    case: Case,
    report: Report,
    config: TargetConfig,
    ignored: list[str],
) -> None:
    """Add the trial and its findings; a lint that the trial disproved becomes a note."""
    from drafttrain.export.doctor.diagnose import run_trial
    from drafttrain.targets.load import load_target

    console.print(
        f"loading the target {config.model} ({config.dtype}); --static examines the files alone", markup=False
    )
    target = load_target(config)
    report.add(
        run_trial(
            case,
            report.findings,
            target,
            first_turns(target, arguments.prompts, arguments.count),
            k=arguments.k,
            max_new_tokens=arguments.max_new_tokens,
            stop_ids=target.stop_ids,
        ),
        ignored,
    )


def _mend(case: Case, report: Report, out: Path, ignored: list[str]) -> None:
    """Write a mended copy, unless nothing can be mended."""
    from drafttrain.export.doctor.mending import mend_case, relint, write_copy

    overruled = set() if report.trial is None else report.trial.overruled
    of_trial = [finding for finding in report.findings if finding.rule == "reading"]
    found = mend_case(case, of_trial, [*ignored, *overruled])
    report.mended, report.left = found.mended, found.left
    if found.mended:
        write_copy(found.case.draft, out)
        report.copy, report.left = out, relint(case, out, [*ignored, *overruled])
    # What the trial found and nothing mended is left.
    report.left += [
        finding for finding in report.findings if finding.rule in ("accepts-nothing", "not-served") and not of_trial
    ]


def _show(console: Console, report: Report) -> None:
    console.print(
        f"{report.draft}: {report.family or 'not recognised'}, for {report.target} in {report.engine}", markup=False
    )
    _table(console, report.findings)
    if report.trial is not None:
        _trial(console, report.trial)
    if report.mended is None:
        fixable = sum(finding.fixable for finding in report.findings)
        if fixable:
            console.print(f"{fixable} of {len(report.findings)} can be mended: --fix OUT writes a mended copy")
    elif report.copy is None:
        console.print("nothing here can be mended without a person: no copy was written")
    else:
        console.print(f"mended in {report.copy}: {', '.join(finding.rule for finding in report.mended)}", markup=False)
        if report.left:
            console.print("left in the copy:")
            _table(console, report.left)
    console.print("[bold red]errors[/bold red]" if report.status else "[green]no errors[/green]")


def _trial(console: Console, trial: Trial) -> None:
    """What was accepted, in the bundled engine and in other readings."""
    from rich.table import Table
    from rich.text import Text

    table = Table("reading", "tokens a round", "accepted at each depth", title="the trial")
    rows = [("as it lies there, in the bundled engine", trial.counters, trial.why, False)]
    rows += [(one.what, one.counters, one.why, one.better) for one in trial.tried]
    for what, counters, why, better in rows:
        cells = (f"{counters.mean_length:.2f}", _shares(counters)) if counters is not None else ("-", why)
        table.add_row(*map(Text, (what, *cells)), style="bold green" if better else None)
    console.print(table)
    if trial.claim is not None:
        shares = " / ".join(f"{share:.2f}" for share in trial.claim["per_position"])
        console.print(
            f"it claims {trial.claim['mean_length']:.2f} tokens a round, {shares} ({trial.claim['source']})",
            markup=False,
        )


def _shares(counters: Counters) -> str:
    return " / ".join(f"{kept / max(counters.drafts, 1):.2f}" for kept in counters.per_position)


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
