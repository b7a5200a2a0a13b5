"""From the host to a device: pinned copies that nobody waits for, and a stream beside the one that trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from drafttrain.drafters.base import DraftBatch


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor on a device; itself where it lies there already.

    From the host to a GPU it goes through pinned memory, and the copy is only begun: what follows on the current stream
    comes after it.
    """
    device = torch.device(device)
    if tensor.device.type != "cpu" or device.type != "cuda":
        return tensor.to(device)
    # Not pin_memory(): of a slice of columns, it pins all columns, and copies them by way of unpinned memory.
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor).to(device, non_blocking=True)


def stream_here(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts in which other threads work on the stream that is current in this one."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.current_stream(device)
    return lambda: torch.cuda.stream(stream)


class SideStream:
    """Where batches are made, beside the stream that uses them. A CPU has no streams: there, nothing is left to do."""

    @contextmanager
    def making(self) -> Iterator[None]:
        """Active in the thread that makes a batch."""
        yield

    def made(self) -> torch.cuda.Event | None:
        """A mark behind all that was begun in `making`."""
        return None

    def hand_over(self, batch: DraftBatch, made: torch.cuda.Event | None) -> None:
        """Let the current stream use a batch as soon as it is made; called by the thread that trains."""

    def catch_up(self) -> None:
        """Let the next batch begin after what the current stream has begun; called by the thread that trains."""


class CudaSideStream(SideStream):
    """A stream of a GPU.

    Args:
        device: the GPU; without an index, the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self.catch_up()  # weights may be on their way

    @contextmanager
    def making(self) -> Iterator[None]:
        """See `SideStream`."""
        # Both are a thread's own.
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield

    def made(self) -> torch.cuda.Event:
        """See `SideStream`."""
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def hand_over(self, batch: DraftBatch, made: torch.cuda.Event | None) -> None:
        """See `SideStream`."""
        using = torch.cuda.current_stream(self._stream.device)
        assert made is not None
        using.wait_event(made)
        for tensor in batch.tensors():
            # Else its memory would go to the next batch while this one is still read.
            tensor.record_stream(using)

    def catch_up(self) -> None:
        """See `SideStream`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))


def side_stream(device: torch.device) -> SideStream:
    """The kind that a device has."""
    return CudaSideStream(device) if device.type == "cuda" else SideStream()
