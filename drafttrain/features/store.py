"""Features on disk: a folder of shards that were written to temporary names and renamed.

    manifest.json                what the store was made for, counts, whether it is complete
    shards/000000/index.json     documents, spans, size and SHA-256 of each file of the shard
    shards/000000/features.bin   [tokens, taps * H], the taps side by side in the manifest's order
    shards/000000/ids.bin        int32 [tokens]
    shards/000000/top1.bin       int32 [tokens], argmax of the target's logits after each token, -1 = not computed

A shard is whole or absent, so a store that was interrupted goes on with the shard that is missing.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafttrain.corpus.types import Sample
from drafttrain.errors import StoreError, UserError
from drafttrain.features.capture import UNKNOWN, check_features
from drafttrain.files import atomic_folder, read_json, require_free_space, sha256_file, write_json
from drafttrain.modeling.taps import Tap

SCHEMA = 1
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_ID_BYTES = 8  # int32 token and int32 top1


@dataclass(frozen=True)
class StoreIdentity:
    """What features depend on. Two stores with equal identities are interchangeable.

    Attributes:
        target: name, for people.
        weights_hash, tokenizer_hash, template_hash: hex digests of the target's parts.
        taps: canonical names in the order in which they lie in a row; "final" is always among them.
        hidden_size: H.
        dtype: element type on disk.
        compute_dtype: in which the target ran.
        schema: version of this layout.
    """

    target: str
    weights_hash: str
    tokenizer_hash: str
    template_hash: str
    taps: tuple[str, ...]
    hidden_size: int
    dtype: str
    compute_dtype: str
    schema: int = SCHEMA

    @property
    def width(self) -> int:
        """Elements of one row."""
        return len(self.taps) * self.hidden_size

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type."""
        return _DTYPES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """What one token takes on disk."""
        return self.width * self.torch_dtype.itemsize + _ID_BYTES

    def differences(self, store: StoreIdentity) -> list[str]:
        """Names and values of what keeps `store` from serving this identity.

        The target's name is no difference, and a store may hold more taps than are read.
        """
        differing = []
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(store, field.name)
            same = set(ours) <= set(theirs) if field.name == "taps" else ours == theirs
            if not same and field.name != "target":
                differing.append(f"{field.name.replace('_', ' ')} (store: {_show(theirs)}, here: {_show(ours)})")
        return differing


def _show(value: Any) -> str:
    if isinstance(value, str) and len(value) == 64:
        return value[:12]
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def read_identity(path: Path) -> StoreIdentity:
    """The identity in a store's manifest.

    Raises:
        StoreError: no manifest, or one that this version cannot read.
    """
    try:
        raw = read_json(path / "manifest.json")
    except UserError as error:
        raise StoreError(
            f"no feature store here: {error.what}",
            where=path / "manifest.json",
            remedy="remove the folder, if it is one, to build it anew",
        ) from None
    identity = raw.get("identity") if isinstance(raw, dict) else None
    found = identity.get("schema") if isinstance(identity, dict) else None
    if identity is None or found != SCHEMA:
        raise StoreError(
            f"the store has schema version {found}, this version reads {SCHEMA}",
            where=path,
            remedy="rebuild it: remove the folder and train again",
        )
    try:
        return StoreIdentity(**{**identity, "taps": tuple(identity["taps"])})
    except (TypeError, KeyError) as error:
        raise StoreError(f"the manifest is damaged: {error}", where=path / "manifest.json") from None


def require_fit(path: Path, wanted: StoreIdentity) -> StoreIdentity:
    """The store's identity; one that was made for something else is refused by the name of what differs."""
    found = read_identity(path)
    differing = wanted.differences(found)
    if differing:
        raise StoreError(
            f"the store was made for another target or draft; what differs: {'; '.join(differing)}",
            where=path,
            remedy="give features.path another folder, or remove this one to build it anew",
        )
    return found


@dataclass(frozen=True)
class _Entry:
    """A document of a shard: `tokens` rows from `start`."""

    shard: int
    start: int
    tokens: int


class StoreReader:
    """Reads a store through memory maps.

    Args:
        path: folder of the store.
        wanted: identity that the store must have, or None to take it as it is.
        allow_incomplete: read a store whose building was interrupted.
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
        self.identity = read_identity(self.path) if wanted is None else require_fit(self.path, wanted)
        self.complete = bool(read_json(self.path / "manifest.json").get("complete"))
        if not self.complete and not allow_incomplete:
            raise StoreError(
                "the store is incomplete: its building was interrupted",
                where=self.path,
                remedy="run the same `drafttrain train` again, it goes on where it stopped",
            )
        names, size = self.identity.taps, self.identity.hidden_size
        self._columns = {
            Tap.parse(name): slice(at * size, (at + 1) * size)
            for at, name in enumerate(names)
            if wanted is None or name in wanted.taps
        }
        self._entries: dict[str, _Entry] = {}
        self._maps: list[tuple[Tensor, Tensor, Tensor]] = []
        for folder in _shard_folders(self.path):
            self._open_shard(folder, verify)

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The taps that `read` gives."""
        return tuple(self._columns)

    @property
    def tokens(self) -> int:
        """Tokens in the store."""
        return sum(entry.tokens for entry in self._entries.values())

    def _open_shard(self, folder: Path, verify: str) -> None:
        index = _check_shard(folder, verify)
        tokens, width = int(index["tokens"]), self.identity.width
        features = torch.from_file(
            str(folder / "features.bin"), size=tokens * width, dtype=self.identity.torch_dtype
        ).view(tokens, width)
        ids = torch.from_file(str(folder / "ids.bin"), size=tokens, dtype=torch.int32)
        top1 = torch.from_file(str(folder / "top1.bin"), size=tokens, dtype=torch.int32)
        shard = len(self._maps)
        self._maps.append((features, ids, top1))
        for document in index["documents"]:
            self._entries[document["id"]] = _Entry(shard, document["start"], document["tokens"])

    def require(self, sample: Sample) -> tuple[int, slice]:
        """Shard and rows of a document of the data.

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
        rows = slice(entry.start, entry.start + entry.tokens)
        ids = torch.from_numpy(sample.ids.astype(np.int32))
        if not torch.equal(self._maps[entry.shard][1][rows], ids):
            raise StoreError(
                f"sample {sample.id} has {entry.tokens} feature rows of other tokens than the {len(ids)} of the data",
                where=self.path,
                remedy="the data changed since the store was built: give features.path another folder",
            )
        return entry.shard, rows

    def read(self, sample: Sample) -> tuple[dict[Tap, Tensor], Tensor]:
        """Features (wanted tap -> [L, H], views of the map) and top1 (int64 [L]) of a document of L tokens.

        Raises:
            StoreError: see `require`.
            DataError: features that are not finite.
        """
        shard, rows = self.require(sample)
        features, _, top1 = self._maps[shard]
        by_tap = {tap: features[rows, columns] for tap, columns in self._columns.items()}
        check_features(sample, by_tap)
        return by_tap, top1[rows].long()


class StoreWriter:
    """Adds documents to a store, a shard at a time; opening one that exists goes on with it.

    Args:
        path: folder of the store; made when it does not exist.
        identity: what it is made for; an existing store must fit, and keeps its own taps.
        shard_bytes: a shard is closed when its features reach this size.
    """

    def __init__(self, path: str | Path, identity: StoreIdentity, *, shard_bytes: int = 256 << 20) -> None:
        self.path = Path(path)
        self.identity = identity
        self._shard_tokens = max(1, shard_bytes // identity.bytes_per_token)
        self._pending: list[tuple[Sample, Tensor, Tensor]] = []
        self._pending_tokens = 0
        known = (self.path / "manifest.json").exists()
        if known:
            self.identity = identity = require_fit(self.path, identity)
        elif self.path.exists() and any(self.path.iterdir()):
            raise StoreError(
                "the folder is no feature store and not empty",
                where=self.path,
                remedy="give features.path another folder",
            )
        # A complete store stays complete until something is added to it.
        if self._drop_damaged_shards() or not known:
            self._write_manifest(complete=False)

    def _drop_damaged_shards(self) -> bool:
        dropped = False
        for folder in _shard_folders(self.path):
            try:
                _check_shard(folder, "size")
            except StoreError:
                # Writing again is what this object is for; reading alone never removes anything.
                shutil.rmtree(folder)
                dropped = True
        for left_over in (self.path / "shards").glob(".*.part"):
            shutil.rmtree(left_over, ignore_errors=True)
        return dropped

    def missing(self, samples: Iterable[Sample]) -> list[Sample]:
        """Those not yet in the store.

        Raises:
            StoreError: the store holds other tokens under a sample's id.
        """
        reader = StoreReader(self.path, allow_incomplete=True, verify="size")
        absent = []
        for sample in samples:
            if sample.id in reader:
                reader.require(sample)
            else:
                absent.append(sample)
        return absent

    def require_space(self, samples: Sequence[Sample]) -> int:
        """Bytes that `samples` will take; refuses before anything is written when the disk has less."""
        needed = sum(len(sample.ids) for sample in samples) * self.identity.bytes_per_token
        require_free_space(self.path, needed + (64 << 20))
        return needed

    def add(self, sample: Sample, features: dict[Tap, Tensor], top1: Tensor | None) -> None:
        """Queue a document; writes a shard when enough have come together.

        Args:
            sample: L tokens.
            features: tap -> [L, H] for every tap of the identity.
            top1: int64 [L], or None.
        """
        check_features(sample, features)
        by_name = {str(tap): value for tap, value in features.items()}
        row = torch.cat([by_name[name] for name in self.identity.taps], dim=-1)
        known = torch.full((len(sample.ids),), UNKNOWN) if top1 is None else top1
        self._pending.append(
            (sample, row.to(device="cpu", dtype=self.identity.torch_dtype), known.to("cpu", torch.int32))
        )
        self._pending_tokens += len(sample.ids)
        if self._pending_tokens >= self._shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what is queued as one shard.

        Raises:
            StoreError: the disk is full; the shards written before stay readable.
        """
        if not self._pending:
            return
        folder = self.path / "shards" / f"{_next_shard(self.path):06d}"
        try:
            self._write_manifest(complete=False)
            with atomic_folder(folder) as partial:
                self._write_shard(partial)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise StoreError(
                f"the disk is full; shards before {folder.name} are whole and stay usable",
                where=self.path,
                remedy="free some space and run the same command again, it goes on with this shard",
            ) from error
        self._pending, self._pending_tokens = [], 0

    def _write_shard(self, folder: Path) -> None:
        columns = {
            "features.bin": torch.cat([row for _, row, _ in self._pending]).contiguous().view(torch.uint8),
            "ids.bin": torch.cat([torch.from_numpy(s.ids.astype(np.int32)) for s, _, _ in self._pending]),
            "top1.bin": torch.cat([top1 for _, _, top1 in self._pending]),
        }
        documents, start = [], 0
        for sample, row, _ in self._pending:
            spans = [[int(first), int(last)] for first, last in sample.spans]
            documents.append({"id": sample.id, "start": start, "tokens": int(row.shape[0]), "spans": spans})
            start += int(row.shape[0])
        files = {}
        for name, column in columns.items():
            column.numpy().tofile(folder / name)
            files[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
        write_json(folder / "index.json", {"tokens": start, "files": files, "documents": documents})

    def finish(self) -> None:
        """Write the last shard and mark the store complete."""
        self.flush()
        self._write_manifest(complete=True)

    def _write_manifest(self, *, complete: bool) -> None:
        indices = [read_json(folder / "index.json") for folder in _shard_folders(self.path)]
        write_json(
            self.path / "manifest.json",
            {
                "identity": asdict(self.identity),
                "complete": complete,
                "shards": len(indices),
                "documents": sum(len(index["documents"]) for index in indices),
                "tokens": sum(index["tokens"] for index in indices),
            },
        )


def _shard_folders(path: Path) -> list[Path]:
    return sorted(folder for folder in (path / "shards").glob("[0-9]*") if folder.is_dir())


def _next_shard(path: Path) -> int:
    folders = _shard_folders(path)
    return int(folders[-1].name) + 1 if folders else 0


def _check_shard(folder: Path, verify: str) -> dict[str, Any]:
    """The shard's index, once its files are found to be what the index says."""
    remedy = "remove this shard's folder and train again: only this shard is built anew"
    try:
        index: dict[str, Any] = read_json(folder / "index.json")
        files = index["files"].items()
    except (UserError, KeyError, AttributeError, TypeError) as error:
        raise StoreError(f"the shard's index is damaged: {error}", where=folder, remedy=remedy) from None
    for name, expected in files:
        file = folder / name
        size = file.stat().st_size if file.exists() else 0
        if size != expected["bytes"]:
            raise StoreError(f"{name} is truncated: {size} of {expected['bytes']} bytes", where=folder, remedy=remedy)
        if verify == "checksum" and sha256_file(file) != expected["sha256"]:
            raise StoreError(f"{name} is damaged: its checksum differs", where=folder, remedy=remedy)
    return index
