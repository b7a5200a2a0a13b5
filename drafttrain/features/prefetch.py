"""Micro-batches as the training loop takes them: made when they are asked for, or ahead, by one thread.

Order and content are the same either way. A source is asked by one thread at a time, in the order of training, so what
it remembers (known tokens, a store that fills) does not depend on how far ahead it is asked.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import torch

from drafttrain.drafters.base import DraftBatch
from drafttrain.features.layout import Rows
from drafttrain.features.sources import FeatureSource, WaitingSource
from drafttrain.features.transfer import side_stream
from drafttrain.features.waiting import outcome

_LAST_WAIT_S = 10.0
"""How long a source that waits for others may take to give up; `close` of the source ends what is left."""


@dataclass
class Ready:
    """A micro-batch.

    Attributes:
        target_s: seconds that the target took for it.
        gave_up: it is blank, see `WaitingSource`.
    """

    batch: DraftBatch
    target_s: float
    gave_up: bool


class Batches(Protocol):
    """Gives micro-batches in the order of training.

    Attributes:
        ahead: whether they are made while others are trained on.
    """

    ahead: bool

    def take(self, rows: Rows) -> Ready:
        """The next one, which must be of these rows. Raises what the source raised over it."""
        ...

    def still(self) -> AbstractContextManager[None]:
        """While active, nothing is made: the target and the device are needed for something else."""
        ...

    def close(self) -> None:
        """Make no more. Called before the source is closed."""
        ...


class InTurn:
    """Makes each micro-batch when it is asked for."""

    ahead = False

    def __init__(self, source: FeatureSource, device: torch.device) -> None:
        self._source, self._device = source, device

    def take(self, rows: Rows) -> Ready:
        """See `Batches`."""
        return _make(self._source, rows, self._device)

    def still(self) -> AbstractContextManager[None]:
        """See `Batches`."""
        return nullcontext()

    def close(self) -> None:
        """See `Batches`."""


@dataclass
class _Job:
    """A micro-batch to make."""

    rows: Rows
    result: Future[tuple[Ready, torch.cuda.Event | None]] = field(default_factory=Future)


class Prefetcher:
    """Makes micro-batches ahead, on a GPU beside what is trained there.

    Args:
        source: asked by one thread of its own; it must run nothing that ranks do together.
        device: where the batches go.
        count: micro-batches that are begun or ready and not yet taken, at least 1.
        order: the rows of all micro-batches that will be taken; read by the thread that takes them.
    """

    ahead = True

    def __init__(self, source: FeatureSource, device: torch.device, count: int, order: Iterator[Rows]) -> None:
        self._source, self._device, self._count, self._order = source, device, count, order
        self._waits = isinstance(source, WaitingSource)
        self._side = side_stream(device)
        self._asked: deque[_Job] = deque()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._making = threading.Lock()
        self._closed = False
        self._threads = torch.get_num_threads()
        # A daemon: a source that hangs must not keep a process alive that was told to end.
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._ask()
        self._thread.start()

    def take(self, rows: Rows) -> Ready:
        """See `Batches`."""
        job = self._asked.popleft()
        if _names(job.rows) != _names(rows):
            raise RuntimeError(f"asked for {_names(rows)}, next in order is {_names(job.rows)}")
        ready, made = outcome(job.result)
        self._ask()
        self._side.hand_over(ready.batch, made)
        return ready

    @contextmanager
    def still(self) -> Iterator[None]:
        """See `Batches`. What is being made is waited for."""
        with self._making:
            yield
        self._side.catch_up()

    def close(self) -> None:
        """See `Batches`. What is being made is waited for, unless it waits itself: then it is told to give up."""
        self._closed = True
        self._jobs.put(None)
        if self._asked and isinstance(self._source, WaitingSource):
            self._source.give_up()
        self._thread.join(_LAST_WAIT_S if self._waits else None)

    def _ask(self) -> None:
        while len(self._asked) < self._count and (rows := next(self._order, None)) is not None:
            self._asked.append(_Job(rows))
            self._jobs.put(self._asked[-1])

    def _run(self) -> None:
        # Sums depend on how many threads share them, and torch keeps their number by thread.
        torch.set_num_threads(self._threads)
        while self._make_next():
            pass

    def _make_next(self) -> bool:
        """Make the next one that is asked for; False when there is none to come."""
        job = self._jobs.get()
        with self._making:
            if job is None or self._closed:
                return False
            try:
                with self._side.making():
                    job.result.set_result((_make(self._source, job.rows, self._device), self._side.made()))
            except BaseException as error:  # raised where it is taken
                job.result.set_exception(error)
                return False
        return True


def _make(source: FeatureSource, rows: Rows, device: torch.device) -> Ready:
    before = source.target_s
    batch = source.batch(rows, device)
    return Ready(batch, source.target_s - before, isinstance(source, WaitingSource) and source.gave_up)


def _names(rows: Rows) -> list[list[str]]:
    return [[sample.id for sample in row] for row in rows]
