"""Batches made ahead: the same ones in the same order, bounded, with the source's errors, and a thread that ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from drafttrain.drafters.base import DraftBatch
from drafttrain.errors import DataError
from drafttrain.features.layout import Rows, lay_out
from drafttrain.features.prefetch import Batches, InTurn, Prefetcher
from drafttrain.features.sources import OnlineFeatures
from drafttrain.features.transfer import stream_here, to_device
from tests.tiny_training import samples, tiny_target
from tests.unit.features.test_store import CPU, SPEC

ORDER = [[[sample]] for sample in samples(8)]


class Watched:
    """A source that says when it begins and ends, and does `work` before it gives a batch."""

    def __init__(self, work: Callable[[str], Any] = lambda name: None) -> None:
        self.work, self.target_s = work, 0.0
        self.begun: list[str] = []
        self.busy = False
        self.threads: set[str] = set()

    def batch(self, rows: Rows, device: torch.device) -> DraftBatch:
        self.busy = True
        self.threads.add(threading.current_thread().name)
        self.begun.append(rows[0][0].id)
        self.work(rows[0][0].id)
        self.target_s += 1.0
        self.busy = False
        return lay_out(rows, device)

    def close(self) -> None:
        pass


class Waiting(Watched):
    """One that waits for others until it is told to give up."""

    def __init__(self) -> None:
        self.hurry, self.gave_up = threading.Event(), False
        super().__init__(lambda name: self.hurry.wait(60))

    def batch(self, rows: Rows, device: torch.device) -> DraftBatch:
        batch = super().batch(rows, device)
        self.gave_up = self.hurry.is_set()
        return batch

    def give_up(self) -> None:
        self.hurry.set()


def prefetcher(source: Any, count: int, order: list[Any] = ORDER) -> Prefetcher:
    return Prefetcher(source, CPU, count, iter(order))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("count", [1, 2, 20])
def test_the_same_batches_in_the_same_order(count: int) -> None:
    target = tiny_target()
    ahead = prefetcher(OnlineFeatures(target, SPEC), count)
    in_turn: Batches = InTurn(OnlineFeatures(tiny_target(), SPEC), CPU)
    for rows in ORDER:
        ours, theirs = ahead.take(rows), in_turn.take(rows)
        assert ours.target_s > 0 and theirs.target_s > 0 and not ours.gave_up
        pairs = zip(ours.batch.tensors(), theirs.batch.tensors(), strict=True)
        assert all(torch.equal(mine, other) for mine, other in pairs)
        assert ours.batch.sample_ids == theirs.batch.sample_ids
    ahead.close()
    assert not threads()


def test_they_are_made_while_others_are_used_and_no_more_than_allowed() -> None:
    source = Watched()
    ahead = prefetcher(source, 2)
    # Nothing was taken yet: both are made, and the third is not.
    until(lambda: len(source.begun) == 2)
    ahead.take(ORDER[0])
    until(lambda: len(source.begun) == 3)
    time.sleep(0.05)
    assert source.begun == ["s0", "s1", "s2"] and source.threads == {"prefetch"}
    ahead.close()


def test_each_batch_says_what_the_target_took_for_it() -> None:
    ahead = prefetcher(Watched(), 5)
    assert [ahead.take(rows).target_s for rows in ORDER] == [1.0] * len(ORDER)
    ahead.close()


def test_an_error_of_the_source_comes_where_it_belongs() -> None:
    raised: list[DataError] = []

    def work(name: str) -> None:
        if name == "s2":
            raised.append(DataError("NaN", where=f"sample {name}", remedy="remove it"))
            raise raised[0]

    source = Watched(work)
    ahead = prefetcher(source, 4)
    until(lambda: bool(raised))
    assert [ahead.take(rows).batch.sample_ids for rows in ORDER[:2]] == [[["s0"]], [["s1"]]]
    with pytest.raises(DataError, match="sample s2: NaN\n  remove it") as caught:
        ahead.take(ORDER[2])
    assert caught.value is raised[0]
    ahead.close()
    assert source.begun == ["s0", "s1", "s2"] and not threads()


def test_another_order_than_announced_is_no_silent_mixture() -> None:
    ahead = prefetcher(Watched(), 1)
    with pytest.raises(RuntimeError, match="next in order is"):
        ahead.take(ORDER[1])
    ahead.close()


def test_nothing_is_made_while_the_target_is_needed() -> None:
    going = threading.Event()
    source = Watched(lambda name: going.wait(20))
    ahead = prefetcher(source, 3)
    until(lambda: source.busy)
    threading.Timer(0.05, going.set).start()
    with ahead.still():
        begun = list(source.begun)
        assert not source.busy and going.is_set()
        time.sleep(0.05)
        assert source.begun == begun
    assert [ahead.take(rows).batch.sample_ids[0] for rows in ORDER[:4]] == [["s0"], ["s1"], ["s2"], ["s3"]]
    ahead.close()


def test_closing_waits_for_what_is_being_made_and_begins_nothing_new() -> None:
    going = threading.Event()
    source = Watched(lambda name: going.wait(20))
    ahead = prefetcher(source, 4)
    until(lambda: source.busy)
    threading.Timer(0.05, going.set).start()
    ahead.close()
    assert not threads() and not source.busy and source.begun == ["s0"]


def test_a_source_that_waits_is_told_to_give_up() -> None:
    source = Waiting()
    ahead = prefetcher(source, 2)
    until(lambda: source.busy)
    began = time.monotonic()
    ahead.close()
    assert not threads() and time.monotonic() - began < 5
    # Where nothing is waited for, it can go on.
    source = Waiting()
    source.hurry.set()
    ahead = prefetcher(source, 1, ORDER[:1])
    ahead.take(ORDER[0])
    source.hurry.clear()
    ahead.close()
    assert not source.hurry.is_set()


def test_giving_up_marks_the_batch_that_is_blank_and_not_those_before() -> None:
    source = Waiting()
    source.hurry.set()
    ahead = prefetcher(source, 1)
    until(lambda: source.begun == ["s0"] and not source.busy)
    assert ahead.take(ORDER[0]).gave_up
    ahead.close()
    plain = prefetcher(Watched(), 1)
    assert not plain.take(ORDER[0]).gave_up
    plain.close()


def test_on_a_cpu_nothing_is_copied() -> None:
    tensor = torch.arange(6).view(2, 3)
    assert to_device(tensor, "cpu") is tensor
    with stream_here(CPU)():
        pass
