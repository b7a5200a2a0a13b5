"""Signals that ask a run to save and stop; a second SIGINT stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# SIGUSR1 is what Slurm sends ahead of a time limit with `--signal=USR1@120`, SIGHUP a terminal that is closed.
_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


class StopRequest:
    """While active, `asked` becomes True on SIGTERM, SIGINT, SIGUSR1 or SIGHUP instead of the process dying.

    SIGHUP stays ignored where the process was started so, as nohup does.

    Args:
        tell: called then, in the signal handler.
    """

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self.asked = False
        self._tell = tell
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        # Handlers can be set in the main thread only; elsewhere the process's own stay.
        if threading.current_thread() is threading.main_thread():
            for number in _STOP:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        self._tell()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
