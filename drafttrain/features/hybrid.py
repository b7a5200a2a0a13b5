"""Features from a store where it has them, from the target where it has not; what was computed is added."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import DraftBatch
from drafttrain.features.building import job_name
from drafttrain.features.capture import capture
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.layout import Rows, by_document, lay_out
from drafttrain.features.lock import Part
from drafttrain.features.reader import StoreReader
from drafttrain.features.sources import Buffers
from drafttrain.features.store import StoreIdentity
from drafttrain.features.writer import StoreWriter
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import Tap


class HybridFeatures:
    """Reads, computes, and writes while training. The first epoch over new documents fills the store.

    A computed document is given out as it will be read: rounded to the store's element type. So a run that was
    interrupted and resumed sees the features of an unbroken one. As soon as no document is missing, the store is
    marked complete and other jobs may write to it.

    Args:
        path: folder of the store; made when it does not exist.
        identity: what it is for.
        target: computes what is missing.
        samples: every document that will be asked for.
        config: of the recipe.
        part: this rank's; ranks write at once, each its own shards.

    Raises:
        StoreError: a foreign or damaged store, one that another job is writing to, or a disk too small for the rest.
    """

    def __init__(
        self,
        path: str | Path,
        identity: StoreIdentity,
        target: CausalLM,
        samples: Sequence[Sample],
        config: FeaturesConfig,
        part: Part,
    ) -> None:
        self.target, self.target_s = target, 0.0
        self._samples, self._batch_tokens = samples, config.batch_tokens
        self._writer = StoreWriter(
            path, identity, shard_bytes=config.shard_mib << 20, part=part, job=job_name(identity, samples)
        )
        try:
            self._reader = StoreReader(path, identity, allow_incomplete=True, verify=config.verify)
            self.missing = self._writer.missing(samples)
            self._writer.require_space(self.missing)
        except BaseException:
            self._writer.close()
            raise
        self._writing, self._others = True, part.count - 1
        # Documents that are neither in the store nor in this rank's queue, and their tokens. They are written as they
        # are here: a batch may hold a copy without spans, which keeps a rank in step and says nothing of the labels.
        self._left = {sample.id: sample for sample in self.missing}
        self._left_tokens = sum(len(sample.ids) for sample in self.missing)
        # What is written holds every tap of the store, what is read those of this draft.
        self._all_taps = tuple(Tap.parse(name) for name in self._writer.identity.taps)

    def batch(self, rows: Rows, device: torch.device) -> DraftBatch:
        """See `FeatureSource`."""
        batch = lay_out(rows, device)
        buffers = Buffers(batch, True)
        found = by_document(rows)
        samples = {name: at[0].sample for name, at in found.items()}
        if self._writing:
            self._fill([sample for sample in samples.values() if not self._has(sample)])
        self._reader.will_need(samples.values())
        for name, at in found.items():
            queued = self._writer.queued(samples[name])
            if queued is None:
                features, top1 = self._reader.read(samples[name], device)
            else:
                features = queued.decode(self._reader.identity, self._reader.taps, device)
                top1 = queued.top1.long()
            for place in at:
                buffers.put(place, features, top1)
        return batch

    def _has(self, sample: Sample) -> bool:
        return sample.id in self._reader or self._writer.queued(sample) is not None

    def _fill(self, absent: list[Sample]) -> None:
        """Compute what is absent, and stop writing once the ranks have written everything."""
        if absent or self._others:
            self._refresh()  # another rank may have written them
        absent = [self._left[sample.id] for sample in absent if not self._has(sample)]
        if absent:
            self._compute(absent)
        queued = self._writer.queued_tokens
        # What is left may be queued by the other ranks, and what is queued here is left for them. The longest queue
        # always meets this; ranks that are equally fast meet it when nothing is left to be computed.
        if self._left and queued > 0 and self._left_tokens <= self._others * queued:
            self._writer.flush()
            self._refresh()
        if not self._left:
            self.close()
            self._refresh()

    def _compute(self, absent: list[Sample]) -> None:
        began = time.perf_counter()
        for captured in capture(
            self.target, absent, self._all_taps, batch_tokens=self._batch_tokens, wants_top1=lambda _: True
        ):
            self._writer.add(captured.sample, captured.features, captured.top1)
        self.target_s += time.perf_counter() - began
        self._found(sample.id for sample in absent)
        self._refresh()  # a shard may have become full

    def _refresh(self) -> None:
        self._found(self._reader.refresh())

    def _found(self, names: Iterable[str]) -> None:
        for name in names:
            if (sample := self._left.pop(name, None)) is not None:
                self._left_tokens -= len(sample.ids)

    def close(self) -> None:
        """Write what is queued, mark the store complete if it holds every document, and let other jobs write to it.
        Does nothing where that is done."""
        if not self._writing:
            return
        self._writing = False
        try:
            self._writer.finish(self._samples)
        finally:
            self._writer.close()
