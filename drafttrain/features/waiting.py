"""Waiting in the main thread for what another one makes."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

_LOOK_UP_S = 0.2
"""Python runs the handler of a signal in the main thread alone, and one that waits without end learns of a signal
only if the system gave it to that very thread."""


def outcome(future: Future[T]) -> T:
    """What a future holds once it is there; signals that come meanwhile are handled.

    Raises:
        BaseException: what the future was failed with.
    """
    while not wait([future], _LOOK_UP_S).done:
        pass
    return future.result()
