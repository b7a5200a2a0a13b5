"""`drafttrain eval`: measure a run's draft, or show what was measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drafttrain.cli.common import run_folder
from drafttrain.cli.parser import is_override

if TYPE_CHECKING:
    from rich.console import Console

_EPILOG = """examples:
  drafttrain eval runs/quickstart --suite eval/suites/core.yaml
  drafttrain eval runs/quickstart --suite eval/suites/core.yaml limit=16 temperatures=[0.0]
  drafttrain eval runs/quickstart --suite eval/suites/humaneval.yaml target.dtype=bfloat16
  drafttrain eval recipes/quickstart.yaml --suite eval/suites/core.yaml drafts=[ngram,oracle]
  drafttrain eval --leaderboard
"""


def register(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "eval",
        help="acceptance and speed-up of a draft, as a table, JSON and an HTML report",
        description="Run a suite with a draft and without one, in turns, and compare.",
        epilog=_EPILOG,
    )
    parser.add_argument("run_folder", nargs="?", metavar="RUN", help="a run's folder, or its recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the suite, or of target.*")
    parser.add_argument("--suite", metavar="SUITE", help="a suite file, such as eval/suites/core.yaml")
    parser.add_argument("--out", type=Path, metavar="DIR", help="default: RUN/eval/<suite>")
    parser.add_argument(
        "--fresh", action="store_true", help="measure again what an interrupted eval like this one has measured"
    )
    parser.add_argument(
        "--leaderboard",
        action="store_true",
        help="alone: render the results in eval/leaderboard; with a run: enter its result also where other prompts or "
        "lengths than the suite's were asked for",
    )
    parser.add_argument("--leaderboard-dir", type=Path, metavar="DIR", help="another place for leaderboard rows")
    parser.add_argument("--no-leaderboard", action="store_true", help="keep this result out of the leaderboard")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, or render the leaderboard."""
    from rich.console import Console

    from drafttrain.errors import UserError

    console = Console()
    if arguments.leaderboard and arguments.no_leaderboard:
        raise UserError("--leaderboard and --no-leaderboard exclude each other", remedy="leave one of them out")
    run, suite, overrides = arguments.run_folder, arguments.suite, arguments.overrides
    if arguments.leaderboard and run is None and not overrides and suite is None:
        return _leaderboard(arguments, console)
    more = sum(not is_override(word) for word in overrides)
    if run is None or more or suite is None:
        found = "no run" if run is None else f"{1 + more} runs" if more else "no --suite"
        usage = "drafttrain eval RUN --suite SUITE [key=value ...], or drafttrain eval --leaderboard"
        raise UserError(f"eval needs one run and a suite, got {found}", remedy=usage)
    return _evaluate(arguments, run, suite, overrides, console)


def _leaderboard(arguments: argparse.Namespace, console: Console) -> int:
    from drafttrain.bench.leaderboard import default_folder, leaderboard_table, read_rows, write_page

    folder = arguments.leaderboard_dir or default_folder()
    rows = read_rows(folder)
    console.print(leaderboard_table(rows) if rows else f"no results in {folder}")
    if rows:
        console.print(f"page: {write_page(folder)}", soft_wrap=True, markup=False)
    return 0


def _evaluate(arguments: argparse.Namespace, run: str, suite_file: str, overrides: list[str], console: Console) -> int:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from drafttrain.bench.evaluate import add_to_leaderboard, evaluate, require_run, split_overrides, write_result
    from drafttrain.bench.leaderboard import changed_unseen, default_folder
    from drafttrain.bench.report.terminal import result_table
    from drafttrain.bench.suite import load_suite
    from drafttrain.drafters.saving import find_draft
    from drafttrain.files import exclusive
    from drafttrain.recipe.load import load_recipe

    of_suite, of_target = split_overrides(overrides)
    suite = load_suite(suite_file, of_suite)
    require_run(run, suite)
    # A mistyped run must be refused before a folder of its name is made.
    recipe = load_recipe(run, of_target)
    if suite.uses_run:
        find_draft(run)
    folder = arguments.out or run_folder(run, recipe) / "eval" / suite.name
    _make(folder)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        exclusive(folder / ".lock", "measuring into this folder"),
        Progress(*columns, console=console, transient=True) as bar,
    ):
        task = bar.add_task("loading", total=None)
        shown: tuple[str, int] | None = None

        def show(what: str, done: int, total: int) -> None:
            nonlocal shown
            bar.update(task, description=what, completed=done, total=total)
            if not console.is_terminal and (what.split(": ")[0], done) != shown:
                shown = (what.split(": ")[0], done)
                console.print(f"{shown[0]}: {done} of {total} conversations", markup=False)

        def say(message: str) -> None:
            console.print(message, markup=False, soft_wrap=True)

        result, measured = evaluate(run, suite, of_target, show, folder, arguments.fresh, say)
        written = write_result(result, measured, folder)
    console.print(result_table(result))
    console.print(f"report: {written.report}", soft_wrap=True, markup=False)
    console.print(f"result: {written.result}", soft_wrap=True, markup=False)
    partial = [] if arguments.leaderboard else changed_unseen(of_suite)
    if arguments.no_leaderboard or partial:
        why = f": {', '.join(partial)} is not the suite's; --leaderboard enters it all the same" if partial else ""
        console.print(f"rows: {written.rows} (not in the leaderboard{why})", markup=False, soft_wrap=True)
    else:
        rows = add_to_leaderboard(result, arguments.leaderboard_dir or default_folder())
        console.print(f"leaderboard rows: {rows}", soft_wrap=True, markup=False)
    return 0


def _make(folder: Path) -> None:
    """Find out before the measurement, not behind it, that nothing can be written."""
    from drafttrain.errors import UserError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"cannot be made: {error.strerror}", where=folder, remedy="give another place by --out"
        ) from None
