"""Feature sources: what turns rows of documents into a training batch."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import DraftBatch
from drafttrain.features.capture import UNKNOWN, capture
from drafttrain.features.layout import Place, Rows, by_document, lay_out, places
from drafttrain.features.reader import StoreReader
from drafttrain.features.transfer import stream_here, to_device
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import FeatureSpec, Tap


class FeatureSource(Protocol):
    """Gives training batches with the taps of a draft and `Tap.final`.

    Attributes:
        target_s: seconds spent so far in the target itself.
    """

    target_s: float

    def batch(self, rows: Rows, device: torch.device) -> DraftBatch:
        """The rows with features [B, T, H] a tap and top1 [B, T]; padding is zero, top1 -1 where unknown."""
        ...

    def close(self) -> None:
        """Finish what was begun; called once, when training is over or broken off."""
        ...


@runtime_checkable
class WaitingSource(FeatureSource, Protocol):
    """A source that waits for others as long as it takes, or until it is closed, in another thread if need be.

    Attributes:
        gave_up: whether a batch could not be had after `give_up`; it was given blank, for ranks to stay in step.
    """

    gave_up: bool

    def give_up(self) -> None:
        """Wait no longer. May be called from a signal handler."""
        ...


def taps_with_final(spec: FeatureSpec) -> tuple[Tap, ...]:
    """The taps of a draft, and the final one that every objective needs; without repeats, in order."""
    return tuple(dict.fromkeys((*spec.taps, Tap.final)))


class OnlineFeatures:
    """Runs the frozen target on each batch.

    The target's next tokens are remembered (see `KnownTokens`): its head over the full vocabulary is computed in the
    first epoch only.

    Args:
        target: in its own dtype, on its own device.
        spec: what the draft reads.
        batch_tokens: tokens of one forward, padding included.
        want_top1: whether batches carry `top1`.
    """

    def __init__(
        self, target: CausalLM, spec: FeatureSpec, *, batch_tokens: int = 4096, want_top1: bool = True
    ) -> None:
        self.target = target
        self.taps = taps_with_final(spec)
        self._batch_tokens = batch_tokens
        self._want_top1 = want_top1
        self._known = KnownTokens()
        self.target_s = 0.0

    def batch(self, rows: Rows, device: torch.device) -> DraftBatch:
        """See `FeatureSource`."""
        batch = lay_out(rows, device)
        found = by_document(rows)
        samples = [at[0].sample for at in found.values()]
        buffers = Buffers(batch, self._want_top1)
        began = time.perf_counter()
        for captured in capture(
            self.target, samples, self.taps, batch_tokens=self._batch_tokens, wants_top1=self._is_new
        ):
            sample, top1 = captured.sample, captured.top1
            if top1 is not None:
                self._known.keep(sample.id, top1)
            elif self._want_top1 and sample.spans:
                top1 = self._known[sample.id]
            for place in found[sample.id]:
                buffers.put(place, captured.features, top1)
        # Scattering is a copy of a few MB beside the forward, so it is counted with it.
        self.target_s += time.perf_counter() - began
        return batch

    def close(self) -> None:
        """See `FeatureSource`; there is nothing to finish."""

    def _is_new(self, sample: Sample) -> bool:
        # A copy without spans keeps a rank in step: it has no labels, and the document itself is yet to come.
        return self._want_top1 and bool(sample.spans) and sample.id not in self._known


class StoredFeatures:
    """Reads features from a store on disk.

    Args:
        reader: of a store that holds every document.
        workers: threads that read documents of a batch; more than one where the disk, not the memory, is waited for.
    """

    def __init__(self, reader: StoreReader, workers: int = 1) -> None:
        self.reader = reader
        self.target_s = 0.0
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="features") if workers > 1 else None

    def batch(self, rows: Rows, device: torch.device) -> DraftBatch:
        """See `FeatureSource`."""
        batch = lay_out(rows, device)
        buffers = Buffers(batch, True)
        documents = list(places(rows))
        self.reader.will_need(place.sample for place in documents)

        stream = stream_here(device)

        def put(place: Place) -> None:
            with stream():
                buffers.put(place, *self.reader.read(place.sample, device))

        for _ in self._pool.map(put, documents) if self._pool else map(put, documents):
            pass
        return batch

    def close(self) -> None:
        """See `FeatureSource`."""
        if self._pool is not None:
            self._pool.shutdown()


class KnownTokens:
    """The target's next tokens by document, 4 bytes each, as far as a budget goes.

    Args:
        budget: tokens that are kept; documents that come when it is spent are computed each time.
    """

    def __init__(self, budget: int = 2**26) -> None:
        self._left = budget
        self._kept: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def __getitem__(self, name: str) -> Tensor:
        return self._kept[name]

    def keep(self, name: str, top1: Tensor) -> None:
        """Remember top1 [L] of a document, if there is room."""
        if name not in self._kept and len(top1) <= self._left:
            self._left -= len(top1)
            self._kept[name] = top1.to("cpu", torch.int32)


class Buffers:
    """Scatters the features of documents into the rows of a batch; several threads may put at once."""

    def __init__(self, batch: DraftBatch, want_top1: bool) -> None:
        self.batch = batch
        self._lock = threading.Lock()
        if want_top1:
            batch.top1 = torch.full_like(batch.tokens, UNKNOWN)

    def put(self, place: Place, features: dict[Tap, Tensor], top1: Tensor | None) -> None:
        """The features of a document, tap -> [L, H], and its top1 [L], where it lies."""
        here = slice(place.start, place.end)
        for tap, value in features.items():
            self._buffer(tap, value)[place.row, here] = to_device(value, self.batch.tokens.device)
        if top1 is not None and self.batch.top1 is not None:
            self.batch.top1[place.row, here] = to_device(top1, self.batch.tokens.device).to(self.batch.top1.dtype)

    def _buffer(self, tap: Tap, value: Tensor) -> Tensor:
        with self._lock:
            buffer = self.batch.features.get(tap)
            if buffer is None:
                shape = (*self.batch.tokens.shape, value.shape[-1])
                buffer = torch.zeros(shape, dtype=value.dtype, device=self.batch.tokens.device)
                self.batch.features[tap] = buffer
            return buffer
