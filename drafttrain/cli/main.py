"""The command line: a table of commands, and what becomes of their errors."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from drafttrain import __version__
from drafttrain.cli import (
    advise,
    calibrate,
    doctor,
    eval,
    export,
    features,
    import_draft,
    inspect,
    plan,
    prompts,
    prove,
    pull,
    push,
    regenerate,
    train,
)
from drafttrain.cli.once import shown_by_another_rank
from drafttrain.cli.parser import CommandParser
from drafttrain.errors import AlreadyReported, UserError

# One module a command, in the order of the work. A module has `register(subparsers)`, which sets the parser's
# default `run` to a function of the parsed arguments; it imports nothing heavy before that is called.
COMMANDS: tuple[ModuleType, ...] = (
    plan,
    prompts,
    regenerate,
    inspect,
    features,
    train,
    calibrate,
    eval,
    advise,
    import_draft,
    export,
    prove,
    doctor,
    push,
    pull,
)

_FULL = "free some space and run the same command again: what was written before is whole"
_CLOSED = "change its permissions, or choose another folder"
_IN_THE_WAY = "move away what is there, or choose another path"
# What a disk may answer to any command, wherever it writes. Other errors of the system are faults of ours.
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: _CLOSED,
    errno.EEXIST: _IN_THE_WAY,
    errno.ENOTDIR: _IN_THE_WAY,
    errno.EISDIR: _IN_THE_WAY,
}


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = CommandParser(
        prog="drafttrain", description="Train, measure and export the drafts of speculative decoding."
    )
    parser.add_argument("--version", action="version", version=f"drafttrain {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.register(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 2 for a user's error, 130 when interrupted."""
    parsed = build_parser().parse_args(arguments)
    try:
        return int(parsed.run(parsed) or 0)
    except AlreadyReported:
        return 2
    except UserError as error:
        _print_error(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (`| head`) is gone; keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        _print_error(UserError(str(error.strerror), where=error.filename, remedy=_REMEDIES[error.errno]))
        return 2


def _print_error(error: UserError) -> None:
    if shown_by_another_rank(str(error)):
        return
    from rich.console import Console
    from rich.text import Text

    message = Text.assemble(("error: ", "bold red"), (str(error), "red"))
    Console(stderr=True, soft_wrap=True).print(message)
