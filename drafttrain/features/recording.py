"""Features that fall off while the target answers: no forward over the finished answers is needed for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from drafttrain.corpus.types import Conversation, Sample, States
from drafttrain.features.capture import top1_of
from drafttrain.features.reader import StoreReader
from drafttrain.features.store import StoreIdentity
from drafttrain.features.writer import StoreWriter
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import Tap


class StateKeeper:
    """Adds to a store the samples whose very tokens the target has read while it answered.

    The others are left to `build_store`: where a template writes behind the answer what the target would not, where it
    shows earlier turns otherwise, and of a run that was killed those that were in no shard yet.

    Args:
        path: folder of the store; one that exists goes on. It is opened when there is something to add.
        identity: what the store is for.
        target: its head says what it would write where a prompt is supervised.
        samples_of: what a conversation becomes.
        shard_bytes: see `StoreWriter`.

    Attributes:
        taps: where states are needed.
        kept: samples that were added.
    """

    def __init__(
        self,
        path: str | Path,
        identity: StoreIdentity,
        target: CausalLM,
        samples_of: Callable[[Conversation], Sequence[Sample]],
        *,
        shard_bytes: int = 256 << 20,
    ) -> None:
        self.path, self.identity, self.target, self.samples_of = Path(path), identity, target, samples_of
        self.taps = tuple(Tap.parse(name) for name in identity.taps)
        self.kept = 0
        self._shard_bytes = shard_bytes
        self._writer: StoreWriter | None = None
        self._before: StoreReader | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is queued, after an interruption, too; not after an error, which may be that of a full disk."""
        if self._writer is None:
            return
        with self._writer:
            if kind is None or not issubclass(kind, Exception):
                self._writer.flush()

    @torch.inference_mode()
    def keep(self, conversation: Conversation, states: States) -> None:
        """Add the samples of a conversation that `states` are those of.

        Raises:
            StoreError: a foreign store, one that another job writes to, or a full disk.
            DataError: states that are not finite; names the sample.
        """
        for sample in self.samples_of(conversation):
            length = len(sample.ids)
            if length > len(states.ids) or not np.array_equal(sample.ids, states.ids[:length]):
                continue
            writer, before = self._open()
            if sample.id in before:
                continue
            features = {tap: states.features[tap][:length] for tap in self.taps}
            final = features[Tap.final].to(self.target.device)
            writer.add(sample, features, top1_of(self.target, sample, final, states.greedy_from))
            self.kept += 1

    def _open(self) -> tuple[StoreWriter, StoreReader]:
        """The store, and what an earlier run left in it."""
        if self._writer is None or self._before is None:
            self._writer = StoreWriter(self.path, self.identity, shard_bytes=self._shard_bytes)
            self._before = StoreReader(self.path, allow_incomplete=True, verify="size")
        return self._writer, self._before
