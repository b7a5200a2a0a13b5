"""Writing a store, a shard at a time. Several processes of one job may write at once."""

from __future__ import annotations

import errno
import shutil
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from drafttrain.corpus.types import Sample
from drafttrain.errors import StoreError
from drafttrain.features.lock import WHOLE, Part, WriteLock, is_lock
from drafttrain.features.reader import StoreReader
from drafttrain.features.shard import Rows, check_shard, write_shard
from drafttrain.features.store import Manifest, StoreIdentity, is_store, read_manifest, require_fit, shard_folders
from drafttrain.files import atomic_folder, require_free_space
from drafttrain.modeling.taps import Tap

_SLACK = 64 << 20
"""Bytes asked for beyond the rows: indices, and whatever else is written to that disk."""


class StoreWriter:
    """Adds documents to a store; opening one that exists goes on with it. Close it, or use it in a `with`.

    Args:
        path: folder of the store; made when it does not exist.
        identity: what it is made for; an existing store must fit, and keeps its own taps.
        shard_bytes: a shard is closed when its rows reach this size.
        part: of the job; the processes of a job write at once, each with another part.
        job: names the job; None for one that shares with nobody.

    Raises:
        StoreError: a foreign store, a folder that is none, or one that another job is writing to.
    """

    def __init__(
        self,
        path: str | Path,
        identity: StoreIdentity,
        *,
        shard_bytes: int = 256 << 20,
        part: Part = WHOLE,
        job: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.identity = identity
        self._part = part
        self._pending: dict[str, tuple[Sample, Rows]] = {}
        self._pending_tokens = 0
        if is_store(self.path):
            # Before the lock: a foreign store is not touched at all.
            require_fit(self.path, identity, read_manifest(self.path).identity)
        self.path.mkdir(parents=True, exist_ok=True)
        self._refuse_other_things()
        self._lock = WriteLock(self.path, job or uuid.uuid4().hex, part, self._prepare)
        found = read_manifest(self.path).identity
        require_fit(self.path, identity, found)
        self.identity = found
        self._shard_tokens = max(1, shard_bytes // found.bytes_per_token)

    def _refuse_other_things(self) -> None:
        """Leave alone a folder that is something else. What a process killed at its very beginning left is ours."""
        names = [file.name for file in self.path.iterdir()]
        ours = [name for name in names if is_lock(name) or name.startswith(".manifest.json.")]
        if "manifest.json" not in names and len(ours) < len(names):
            raise StoreError(
                "the folder is no feature store and not empty",
                where=self.path,
                remedy="give features.path another folder",
            )

    def _prepare(self) -> None:
        """Remove what killed writers left. Writing again is what this is for; reading alone never removes anything."""
        self._refuse_other_things()
        dropped = False
        for folder in shard_folders(self.path):
            try:
                check_shard(folder, "size")
            except StoreError:
                shutil.rmtree(folder)
                dropped = True
        for left_over in (self.path / "shards").glob(".*.part"):
            shutil.rmtree(left_over, ignore_errors=True)
        if not is_store(self.path):
            Manifest(self.identity, False, {}).write(self.path)
        elif dropped:
            self._mark_incomplete()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let other jobs write. What is queued and not flushed is dropped."""
        self._lock.release()

    def missing(self, samples: Iterable[Sample]) -> list[Sample]:
        """Those not yet in the store.

        Raises:
            StoreError: the store holds other tokens under a sample's id, or was built for fewer labels.
        """
        reader = StoreReader(self.path, allow_incomplete=True, verify="size")
        present: list[Sample] = []
        absent: list[Sample] = []
        for sample in samples:
            (present if sample.id in reader else absent).append(sample)
        reader.require(present)
        return absent

    def require_space(self, samples: Sequence[Sample]) -> int:
        """Bytes that `samples` will take; refuses before anything is written when the disk has less."""
        needed = sum(len(sample.ids) for sample in samples) * self.identity.bytes_per_token
        require_free_space(self.path, needed + _SLACK)
        return needed

    def add(self, sample: Sample, features: dict[Tap, Tensor], top1: Tensor | None) -> Rows:
        """Queue a document; writes a shard when enough have come together.

        Args:
            sample: L tokens.
            features: tap -> [L, H] for every tap of the identity.
            top1: int64 [L], or None.

        Returns:
            The rows as they will lie on disk.

        Raises:
            DataError: features that are not finite, or not L rows.
            StoreError: see `flush`.
        """
        return self.add_rows(sample, Rows.encode(self.identity, sample, features, top1))

    def add_rows(self, sample: Sample, rows: Rows) -> Rows:
        """`add` of a document that is encoded already."""
        self._pending[sample.id] = (sample, rows)
        self._pending_tokens += len(sample.ids)
        if self._pending_tokens >= self._shard_tokens:
            self.flush()
        return rows

    def queued(self, sample: Sample) -> Rows | None:
        """The rows of a document that was added and is in no shard yet."""
        found = self._pending.get(sample.id)
        return None if found is None else found[1]

    @property
    def queued_tokens(self) -> int:
        """Tokens of the documents that were added and are in no shard yet."""
        return self._pending_tokens

    def flush(self) -> None:
        """Write what is queued as one shard.

        Raises:
            StoreError: the disk is full; the shards written before stay readable.
        """
        if not self._pending:
            return
        folder = self.path / "shards" / f"{self._next_number():06d}"
        try:
            # A complete store stays complete until something is added to it.
            self._mark_incomplete()
            with atomic_folder(folder) as partial:
                write_shard(partial, list(self._pending.values()))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StoreError(
                f"the disk is full; shards before {folder.name} are whole and stay usable",
                where=self.path,
                remedy="free some space and run the same command again, it goes on with this shard",
            ) from error
        self._pending, self._pending_tokens = {}, 0

    def _next_number(self) -> int:
        """Above all shards, and one that no other part of the job takes."""
        folders = shard_folders(self.path)
        above = int(folders[-1].name) + 1 if folders else 0
        return above + (self._part.index - above) % self._part.count

    def _mark_incomplete(self) -> None:
        manifest = read_manifest(self.path)
        if manifest.complete:
            Manifest(manifest.identity, False, {}).write(self.path)

    def finish(self, samples: Iterable[Sample] = ()) -> bool:
        """Write the last shard, and mark the store complete if every one of `samples` is in it.

        Of several processes, the last one to finish finds all of them.
        """
        self.flush()
        if self.missing(samples):
            return False
        counts = StoreReader(self.path, allow_incomplete=True, verify="size").counts
        Manifest(self.identity, True, counts).write(self.path)
        return True
