"""`drafttrain advise RUN`: what to propose, when not to draft, and what fits, from what an eval measured."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from drafttrain.cli.common import Subparsers, positive

if TYPE_CHECKING:
    from drafttrain.bench.result import EvalResult

_EPILOG = """examples:
  drafttrain eval runs/quickstart --suite eval/suites/tables.yaml
  drafttrain advise runs/quickstart
  drafttrain advise runs/quickstart --suite tables --memory 16G --json
"""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def register(subparsers: Subparsers[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "advise",
        help="the best K or tree by batch size, when not to draft, what fits into memory",
        description="Say what to propose at each batch size, from the timings of an eval of this run; in words, and "
        "as the JSON that vLLM takes. What was measured and what is predicted is told apart.",
        epilog=_EPILOG,
    )
    parser.add_argument("run_folder", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument(
        "--suite", metavar="RESULT", help="a suite's name below RUN/eval, or a result.json; default: the newest"
    )
    parser.add_argument("--memory", type=_size, metavar="16G", help="bytes for target, draft and their caches")
    parser.add_argument(
        "--context", type=positive, metavar="N", help="tokens of a request, for --memory; default: the eval's longest"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the advice."""
    import json
    from dataclasses import asdict

    from drafttrain.bench.advice import advise, vllm_config
    from drafttrain.bench.report.advice import in_words
    from drafttrain.errors import UserError
    from drafttrain.export.vllm import METHODS

    folder: Path = arguments.run_folder
    if arguments.context is not None and arguments.memory is None:
        raise UserError("says nothing without a budget", where="--context", remedy="add --memory 16G")
    result = find_result(folder, arguments.suite)
    advice = advise(result, budget=arguments.memory, context=arguments.context)
    if _is_of_another_draft(result, folder):
        advice.notes.insert(0, "The eval is of another draft than the run has now: measure it again.")
    method = METHODS.get(advice.family)
    refused = None if method is None else _refusal(folder)
    served = None
    if method is not None and refused is None:
        served = vllm_config(advice, method, str(folder / "export" / "vllm"))
    if arguments.json:
        # Plain print: a terminal's width must not break the JSON.
        print(json.dumps({**asdict(advice), "vllm": served, "vllm_refuses": refused}, indent=2, ensure_ascii=False))
        return 0
    for line in in_words(advice):
        print(line)
    print(f"\nFor vLLM, which proposes chains, as {advice.device.upper()} times say:")
    if method is None:
        print(f"  it has no method for the family {advice.family}")
    elif refused is not None:
        print(f"  it does not take this draft: {refused}")
    elif served is None:
        print("  do not draft")
    else:
        print(f"  --speculative-config '{json.dumps(served)}'")
        if len(advice.chains) > 1:
            print(f"  beyond batch {advice.chains[-1][1]}, which nothing here covers, the last entry stays in force")
    return 0


def _is_of_another_draft(result: EvalResult, run: Path) -> bool:
    """Whether the run was trained on since; False where it cannot be told."""
    from drafttrain.drafters.saving import find_draft, weights_sha256
    from drafttrain.errors import CheckpointError

    try:
        return bool(result.weights) and result.weights != weights_sha256(find_draft(run))
    except CheckpointError:
        return False


def _refusal(run: Path) -> str | None:
    """Why the draft cannot be exported to vLLM, in one line; None where it can, or is not there to be asked."""
    from drafttrain.errors import CheckpointError
    from drafttrain.export.ir import ExportError, read_ir
    from drafttrain.export.target_head import reads_target_head
    from drafttrain.export.vllm import VLLM

    try:
        ir = read_ir(run)
        if not reads_target_head(ir):  # the export of the others brings a copy of that head
            VLLM.layout(ir)
    except ExportError as error:
        return " ".join(str(error).split())
    except CheckpointError:
        return None
    return None


def find_result(run: Path, suite: str | None) -> EvalResult:
    """The result that advice is taken from: the one named, or the newest below the run.

    Raises:
        UserError: there is none.
    """
    from drafttrain.bench.result import load_result
    from drafttrain.errors import UserError
    from drafttrain.files import read_json

    remedy = f"measure it: drafttrain eval {run} --suite eval/suites/tables.yaml"
    if not run.is_dir():
        raise UserError("is no run's folder", where=run, remedy="give the folder that training wrote")
    if suite is not None:
        places = [Path(suite), Path(suite) / "result.json", run / "eval" / suite / "result.json"]
        for place in places:
            if place.is_file():
                return load_result(place)
        raise UserError(f"no result of {suite!r}", where=run / "eval", remedy=remedy)
    found = list(run.glob("eval/*/result.json"))
    if not found:
        raise UserError("has no eval, and advice is taken from its timings", where=run, remedy=remedy)
    return load_result(max(found, key=lambda path: str(read_json(path).get("date", ""))))


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 16G")
    return int(float(match[1]) * _UNITS[match[2].upper()])
