"""Feature sources: what turns rows of documents into a training batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import DraftBatch
from drafttrain.errors import StoreError
from drafttrain.features.capture import UNKNOWN, capture
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.layout import Place, Rows, lay_out, places
from drafttrain.features.store import StoreIdentity, StoreReader, StoreWriter
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


def taps_with_final(spec: FeatureSpec) -> tuple[Tap, ...]:
    """The taps of a draft, and the final one that every objective needs; without repeats, in order."""
    return tuple(dict.fromkeys((*spec.taps, Tap.final)))


class OnlineFeatures:
    """Runs the frozen target on each batch.

    The target's next token is remembered for every document, 4 bytes a token: its head over the full vocabulary is
    computed in the first epoch only.

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
        self._known: dict[str, Tensor] = {}
        self.target_s = 0.0

    def batch(self, rows: Rows, device: torch.device) -> DraftBatch:
        """See `FeatureSource`."""
        batch = lay_out(rows, device)
        found: dict[int, list[Place]] = {}
        for place in places(rows):
            found.setdefault(id(place.sample), []).append(place)
        samples = [at[0].sample for at in found.values()]
        buffers = _Buffers(batch, self._want_top1)
        began = time.perf_counter()
        for captured in capture(
            self.target, samples, self.taps, batch_tokens=self._batch_tokens, wants_top1=self._is_new
        ):
            sample, top1 = captured.sample, captured.top1
            if top1 is not None:
                self._known[sample.id] = top1.to("cpu", torch.int32)
            elif self._want_top1:
                top1 = self._known[sample.id]
            for place in found[id(sample)]:
                buffers.put(place, captured.features, top1)
        # Scattering is a copy of a few MB beside the forward, so it is counted with it.
        self.target_s += time.perf_counter() - began
        return batch

    def _is_new(self, sample: Sample) -> bool:
        return self._want_top1 and sample.id not in self._known


class StoredFeatures:
    """Reads features from a store on disk."""

    def __init__(self, reader: StoreReader) -> None:
        self.reader = reader
        self.target_s = 0.0

    def batch(self, rows: Rows, device: torch.device) -> DraftBatch:
        """See `FeatureSource`."""
        batch = lay_out(rows, device)
        buffers = _Buffers(batch, True)
        for place in places(rows):
            features, top1 = self.reader.read(place.sample)
            buffers.put(place, features, top1)
        return batch


class _Buffers:
    """Scatters the features of documents into the rows of a batch."""

    def __init__(self, batch: DraftBatch, want_top1: bool) -> None:
        self.batch = batch
        if want_top1:
            batch.top1 = torch.full_like(batch.tokens, UNKNOWN)

    def put(self, place: Place, features: dict[Tap, Tensor], top1: Tensor | None) -> None:
        here = slice(place.start, place.end)
        for tap, value in features.items():
            buffer = self.batch.features.get(tap)
            if buffer is None:
                shape = (*self.batch.tokens.shape, value.shape[-1])
                buffer = torch.zeros(shape, dtype=value.dtype, device=self.batch.tokens.device)
                self.batch.features[tap] = buffer
            buffer[place.row, here] = value.to(buffer.device)
        if top1 is not None and self.batch.top1 is not None:
            self.batch.top1[place.row, here] = top1.to(self.batch.top1)


def build_store(
    path: str | Path,
    identity: StoreIdentity,
    target: CausalLM,
    samples: Sequence[Sample],
    config: FeaturesConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Compute and write the features of every document that the store lacks.

    Args:
        path: folder of the store; one that was interrupted goes on.
        identity: what the store is for.
        target: computes the features.
        samples: documents.
        config: shard size and batch size.
        progress: called with (tokens done, tokens to do) after each document.

    Raises:
        StoreError: a foreign store, or a disk that is or becomes too small.
        DataError: features that are not finite; names the sample.
    """
    writer = StoreWriter(path, identity, shard_bytes=config.shard_mib << 20)
    todo = writer.missing(samples)
    writer.require_space(todo)
    taps = tuple(Tap.parse(name) for name in writer.identity.taps)
    total, done = sum(len(sample.ids) for sample in todo), 0
    # Blocks of documents in the data's order, sorted by length inside: an interrupted build loses one block at most.
    for block in _blocks(todo, 64 * config.batch_tokens):
        for captured in capture(target, block, taps, batch_tokens=config.batch_tokens, wants_top1=lambda _: True):
            writer.add(captured.sample, captured.features, captured.top1)
            done += len(captured.sample.ids)
            progress(done, total)
    writer.finish()


def _blocks(samples: Sequence[Sample], tokens: int) -> list[list[Sample]]:
    blocks: list[list[Sample]] = []
    size = tokens
    for sample in samples:
        if size >= tokens:
            blocks.append([])
            size = 0
        blocks[-1].append(sample)
        size += len(sample.ids)
    return blocks


def open_store(
    path: str | Path, identity: StoreIdentity, samples: Sequence[Sample], verify: str = "checksum"
) -> StoredFeatures:
    """Open a complete store and make sure that it holds every document.

    Raises:
        StoreError: foreign, damaged, incomplete, or lacking a document.
    """
    reader = StoreReader(path, identity, verify=verify)
    for sample in samples:
        reader.require(sample)
    return StoredFeatures(reader)


def spot_check(source: StoredFeatures, target: CausalLM, samples: Sequence[Sample], count: int = 2) -> None:
    """Compare a few stored documents with a forward here: hashes say what a store was made for, not that it is right.

    Rows that are shifted, cut or of another numbering differ wholly; other kernels and roundings differ by percents.

    Raises:
        StoreError: names the sample and the tap.
    """
    chosen = [samples[index * len(samples) // count] for index in range(min(count, len(samples)))]
    for captured in capture(target, chosen, list(source.reader.taps), batch_tokens=1, wants_top1=lambda _: False):
        stored, _ = source.reader.read(captured.sample)
        for tap, fresh in captured.features.items():
            expected = fresh.float().cpu()
            error = (stored[tap].float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)
            if float(error.mean()) > 0.1:
                raise StoreError(
                    f"the rows of tap {tap} for sample {captured.sample.id} differ from the target's by "
                    f"{float(error.mean()):.0%}",
                    where=source.reader.path,
                    remedy="remove the store and build it anew",
                )
