"""Standard output whose reader goes: the `head` of a pipe, a terminal that is closed.

A command that nobody reads any more ends, as a program that SIGPIPE ends. A run of hours goes on in silence.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from rich.console import Console

UNREAD = 128 + 13
"""Exit status of a command whose output is read no more."""


class _Lasting:
    """A stream that goes silent once it cannot be written to."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._gone = stream, False

    def write(self, text: str) -> int:
        """As of a stream; what cannot be written is lost."""
        self._do(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """As of a stream."""
        self._do(self._stream.flush)

    def _do(self, work: Callable[[], Any]) -> None:
        if self._gone:
            return
        try:
            work()
        except OSError:
            self._gone = True
            _silence(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lasting_console() -> Console:
    """A console on standard output for hours of work, which goes on when nobody can see it any more."""
    from rich.console import Console

    # Without a standard output rich writes nowhere.
    return Console(file=None if sys.stdout is None else cast(IO[str], _Lasting(sys.stdout)))


@contextmanager
def flushed() -> Iterator[None]:
    """Have what was printed reach its reader, or fail, here and not when the interpreter ends."""
    try:
        yield
    except SystemExit:  # of --help
        _flush()
        raise
    _flush()


def _flush() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def is_unread(error: SystemExit | BrokenPipeError) -> bool:
    """Whether a command failed because the reader of standard output has gone, which is silenced then."""
    if isinstance(error, SystemExit):
        # rich makes one of a broken pipe, and has silenced standard output then.
        return isinstance(error.__context__, BrokenPipeError)
    with suppress(OSError, ValueError, AttributeError):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if poll.poll(0):  # other programs break pipes, too
            _silence(sys.stdout)
            return True
    return False


def _silence(stream: IO[str]) -> None:
    """Send what a stream still holds nowhere: it would fail again when the interpreter ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
