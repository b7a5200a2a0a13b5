"""Reading a store: memory maps, any number of threads, processes and ranks at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from drafttrain.corpus.types import Sample
from drafttrain.errors import StoreError
from drafttrain.features.capture import UNKNOWN, check_features, label_sources
from drafttrain.features.lock import last_writer
from drafttrain.features.shard import Rows, check_shard, map_shard, read_ahead
from drafttrain.features.store import Manifest, StoreIdentity, read_manifest, require_fit, shard_folders
from drafttrain.files import read_json
from drafttrain.modeling.taps import Tap

_MAPPED_SHARDS = 4096
"""Shards mapped at once; Linux gives a process 65,530 maps, and a shard takes up to four."""


@dataclass(frozen=True)
class _Entry:
    """A document of a shard: `tokens` rows from `start`."""

    shard: int
    start: int
    tokens: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.start + self.tokens)


class StoreReader:
    """Reads a store through memory maps.

    Args:
        path: folder of the store.
        wanted: identity that the store must have, or None to take it as it is.
        allow_incomplete: read a store whose building was interrupted or still goes on.
        verify: "checksum" hashes every file, "size" compares file sizes only.

    Raises:
        StoreError: foreign, incomplete, truncated or damaged; names the shard.
    """

    def __init__(
        self,
        path: str | Path,
        wanted: StoreIdentity | None = None,
        *,
        allow_incomplete: bool = False,
        verify: str = "checksum",
    ) -> None:
        self.path = Path(path)
        manifest = read_manifest(self.path)
        self.identity = manifest.identity
        if wanted is not None:
            require_fit(self.path, wanted, self.identity)
        self.complete = manifest.complete
        if not self.complete and not allow_incomplete:
            raise StoreError(
                f"the store is incomplete: its building was interrupted, or still goes on ({last_writer(self.path)})",
                where=self.path,
                remedy="wait for it, or run the same command again: it goes on where it stopped",
            )
        names = self.identity.taps if wanted is None else [n for n in self.identity.taps if n in wanted.taps]
        self.taps: tuple[Tap, ...] = tuple(Tap.parse(name) for name in names)
        self._entries: dict[str, _Entry] = {}
        self._shards: list[tuple[Path, int]] = []
        self._known: set[str] = set()
        self._maps: OrderedDict[int, Rows] = OrderedDict()
        self._lock = threading.Lock()
        self.refresh(verify)
        if not allow_incomplete:
            self._require_all(manifest)

    def _require_all(self, manifest: Manifest) -> None:
        found = self.counts
        if any(found[name] < count for name, count in manifest.counts.items()):
            raise StoreError(
                f"holds {found['shards']} of {manifest.counts['shards']} shards, {found['documents']} of "
                f"{manifest.counts['documents']} documents: some were removed",
                where=self.path,
                remedy="build it again: only what is missing is added",
            )

    def refresh(self, verify: str = "size") -> list[str]:
        """Take up shards that were written since; ids of their documents. Other threads must not read meanwhile."""
        found = []
        for folder in shard_folders(self.path):
            if folder.name in self._known:
                continue
            index = check_shard(folder, verify)
            shard = len(self._shards)
            self._known.add(folder.name)
            self._shards.append((folder, int(index["tokens"])))
            for document in index["documents"]:
                self._entries[document["id"]] = _Entry(shard, document["start"], document["tokens"])
                found.append(document["id"])
        return found

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def tokens(self) -> int:
        """Tokens in the store."""
        return sum(entry.tokens for entry in self._entries.values())

    @property
    def counts(self) -> dict[str, int]:
        """Shards, documents and tokens that are there."""
        return {"shards": len(self._shards), "documents": len(self), "tokens": self.tokens}

    def _rows(self, entry: _Entry) -> Rows:
        with self._lock:
            rows = self._maps.get(entry.shard)
            if rows is None:
                folder, tokens = self._shards[entry.shard]
                rows = self._maps[entry.shard] = map_shard(folder, self.identity, tokens)
                if len(self._maps) > _MAPPED_SHARDS:
                    self._maps.popitem(last=False)
            else:
                self._maps.move_to_end(entry.shard)
        return rows.slice(entry.rows)

    def require(self, samples: Iterable[Sample]) -> None:
        """Make sure, before they are read, that these documents can be trained on.

        Raises:
            StoreError: the store lacks one, holds other tokens under its id, or was built for fewer labels; names it.
        """
        for sample in samples:
            if bool((self.rows(sample).top1[label_sources(sample)] == UNKNOWN).any()):
                raise StoreError(
                    f"sample {sample.id} is supervised where the store does not say what the target would write",
                    where=self.path,
                    remedy="it was built with another data.supervise: give features.path another folder",
                )

    def rows(self, sample: Sample) -> Rows:
        """A document of the data as it lies on disk.

        Raises:
            StoreError: the store lacks it, or holds other tokens under its id.
        """
        entry = self._entries.get(sample.id)
        if entry is None:
            raise StoreError(
                f"sample {sample.id} is not in the store",
                where=self.path,
                remedy="train again to add what is missing",
            )
        rows = self._rows(entry)
        ids = torch.from_numpy(sample.ids.astype(np.int32))
        if not torch.equal(rows.ids, ids):
            raise StoreError(
                f"sample {sample.id} has {entry.tokens} feature rows of other tokens than the {len(ids)} of the data",
                where=self.path,
                remedy="the data changed since the store was built: give features.path another folder",
            )
        return rows

    def read(self, sample: Sample, device: torch.device | str = "cpu") -> tuple[dict[Tap, Tensor], Tensor]:
        """A document of L tokens: wanted tap -> [L, H] on `device` (views of the map where nothing had to be
        decoded or moved), and top1, int64 [L].

        Raises:
            StoreError: see `rows`.
            DataError: features that are not finite.
        """
        rows = self.rows(sample)
        features = rows.decode(self.identity, self.taps, device)
        if not self.identity.scaled:  # fp8 has no infinity, and its NaN is never written
            check_features(sample, features)
        return features, rows.top1.long()

    def will_need(self, samples: Iterable[Sample]) -> None:
        """Have the kernel start to read these documents, so that their pages come in together and not one by one."""
        for sample in samples:
            entry = self._entries.get(sample.id)
            if entry is not None:
                read_ahead(self._shards[entry.shard][0], self.identity, entry.rows)

    def documents(self) -> Iterator[tuple[Sample, Rows]]:
        """Every document once, shard by shard."""
        for shard, (folder, _) in enumerate(self._shards):
            for document in read_json(folder / "index.json")["documents"]:
                entry = self._entries[document["id"]]
                if entry.shard == shard:
                    rows = self._rows(entry)
                    spans = [(int(first), int(last)) for first, last in document["spans"]]
                    yield Sample(document["id"], rows.ids.numpy(), spans), rows
