"""CUDA graphs: a function on tensors that stay where they are, recorded once and replayed.

Elsewhere than on CUDA the function is called, so that what is replayed there is what is tested here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch

from drafttrain.errors import EngineError

T = TypeVar("T")

# Runs before the recording: kernels are compiled, libraries choose and allocate.
_WARM_UPS = 2


def buckets(most: int) -> list[int]:
    """Batch sizes that graphs are made for: powers of two and the largest; a batch is filled up to the next of them."""
    if most < 1:
        raise EngineError(f"a batch of at most {most} rows", remedy="it has at least one")
    sizes = [1]
    while 2 * sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return sizes if most == 1 else [*sizes, most]


def bucket_of(rows: int, sizes: Sequence[int]) -> int:
    """The smallest of ascending `sizes` that holds `rows`."""
    for size in sizes:
        if rows <= size:
            return size
    raise EngineError(f"{rows} rows in a batch of at most {sizes[-1]}")


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One a device for all that is recorded: cuBLAS keeps a workspace, 32 MB on sm_90, for each stream it has seen."""
    return torch.cuda.Stream(device)


class Graph(Generic[T]):
    """A function without arguments, whose tensors keep their places, as one launch.

    The function reads and writes tensors made before, launches work of fixed shape and does not synchronise. What it
    returns on CUDA is overwritten by the next call.

    Args:
        function: what to record, at the first call.
        device: where it runs.
        pool: memory shared with other graphs that never run at the same time, from `torch.cuda.graph_pool_handle`.
        capture: record on CUDA; False calls the function there too, to find faults.

    Raises:
        EngineError: at the first call, what cannot be recorded.

    Attributes:
        launches: calls from Python so far; of a recorded graph, each is one.
    """

    def __init__(self, function: Callable[[], T], device: torch.device, pool: Any = None, capture: bool = True) -> None:
        self._function, self._device, self._pool = function, device, pool
        self._capture = capture and device.type == "cuda"
        self._graph: Any = None
        self._out: T
        self.launches = 0

    def __call__(self) -> T:
        """Run it; on CUDA without waiting for it."""
        self.launches += 1
        if not self._capture:
            return self._function()
        if self._graph is None:
            self._record()
        self._graph.replay()
        return self._out

    def _record(self) -> None:
        try:
            self._record_unchecked()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise EngineError(
                f"a round cannot be recorded as a CUDA graph: {str(error).splitlines()[0]}",
                remedy="the architecture may wait for the device in its forward: use Engine(on_device=False)",
            ) from error

    def _record_unchecked(self) -> None:
        side = _recording_stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                self._function()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # The stream that torch takes by itself lies on whichever device was current when the first graph was recorded.
        with torch.cuda.device(self._device), torch.cuda.graph(graph, pool=self._pool, stream=side):
            self._out = self._function()
        self._graph = graph


class Clock:
    """Seconds between marks without a synchronisation: CUDA events, or the host's clock where there is no CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Note where the device is now."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def spans(self) -> list[float]:
        """Seconds between the marks, which are forgotten. The device has passed the last of them."""
        marks, self._marks = self._marks, []
        if self._cuda:
            return [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]
        return [b - a for a, b in pairwise(marks)]
