from __future__ import annotations

import os
import signal

import pytest

from drafttrain.training.signals import StopRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_signals_of_schedulers_ask_to_stop(number: signal.Signals) -> None:
    own = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with StopRequest() as stop:
            assert not stop.asked
            os.kill(os.getpid(), number)
            assert stop.asked
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, own)


def test_nohup_is_obeyed() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_interrupt_stops_at_once() -> None:
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
