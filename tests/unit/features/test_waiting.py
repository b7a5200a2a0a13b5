"""The main thread hears of signals while it waits for another."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import Future
from types import FrameType

import pytest

from drafttrain.features.waiting import outcome


def test_a_signal_that_another_thread_got_is_handled_while_the_main_one_waits() -> None:
    future: Future[str] = Future()

    def handler(number: int, frame: FrameType | None) -> None:
        future.set_result(threading.current_thread().name)

    def work() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        if not ended.wait(20):
            future.set_result("nobody")

    ended, before = threading.Event(), signal.signal(signal.SIGUSR1, handler)
    thread = threading.Thread(target=work)
    try:
        thread.start()
        assert outcome(future) == threading.main_thread().name
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_a_failure_is_raised_where_it_is_waited_for() -> None:
    future: Future[str] = Future()
    future.set_exception(TimeoutError("of its own"))
    with pytest.raises(TimeoutError, match="of its own"):
        outcome(future)
