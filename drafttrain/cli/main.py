"""The command line: a table of commands, and what becomes of their errors."""

from __future__ import annotations

import argparse
import errno
import io
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
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
from drafttrain.cli.once import shown_by_another_rank, tell_launcher
from drafttrain.cli.output import UNREAD, flushed, is_unread
from drafttrain.cli.parser import CommandParser
from drafttrain.errors import AlreadyReported, UserError
from drafttrain.files import CACHE_REMEDY, cache_dir

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
_BROKEN = "look at the disk or the network that it lies on, and run the same command again"
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
    errno.ELOOP: _IN_THE_WAY,
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EFBIG: "raise the size that a file may have: ulimit -f unlimited",
    errno.EMFILE: "raise the number of files that a process may open: ulimit -n 4096",
    errno.EIO: _BROKEN,
    errno.ESTALE: _BROKEN,
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
    """Run one command. Returns the exit status: 0, 2 for a user's error, 130 when interrupted, 141 when unread."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal or log of another encoding than UTF-8 must not end a run over one character.
            stream.reconfigure(errors="backslashreplace")
    try:
        with flushed():
            parsed = build_parser().parse_args(arguments)
            return int(parsed.run(parsed) or 0)
    except AlreadyReported:
        return 2
    except UserError as error:
        _print_error(error)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (SystemExit, BrokenPipeError) as error:
        if is_unread(error):
            return UNREAD
        raise
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        _print_error(UserError(str(error.strerror), where=error.filename, remedy=_remedy(error)))
        return 2


def _remedy(error: OSError) -> str:
    """What to do about an error of the disk."""
    assert error.errno is not None
    with suppress(UserError, TypeError):
        cache, path = cache_dir(), Path(error.filename)
        # The folders above it may be missing, too.
        if path in (cache, *cache.parents) or cache in path.parents:
            return CACHE_REMEDY
    return _REMEDIES[error.errno]


def _print_error(error: UserError) -> None:
    tell_launcher(str(error))
    if shown_by_another_rank(str(error)):
        return
    from rich.console import Console
    from rich.text import Text

    message = Text.assemble(("error: ", "bold red"), (str(error), "red"))
    Console(stderr=True, soft_wrap=True).print(message)
