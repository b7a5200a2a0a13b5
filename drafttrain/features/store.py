"""Features on disk: a folder of shards that were written to temporary names and renamed.

    manifest.json                what the store was made for, whether it is complete, and then its counts
    recipe.yaml, provenance.json the recipe that it was built from, and each launch that wrote to it
    writing.lock                 the job that writes here, or wrote here last
    shards/000000/index.json     documents, spans, size and SHA-256 of each file of the shard
    shards/000000/features.bin   [tokens, taps * H], the taps side by side in the manifest's order
    shards/000000/scales.bin     int8 [tokens, taps], of fp8 stores alone: value = features * 2 ** scale
    shards/000000/ids.bin        int32 [tokens]
    shards/000000/top1.bin       int32 [tokens], argmax of the target's logits after each token, -1 = not computed

A shard is whole or absent, so a store that was interrupted goes on with what is missing. Several processes may write
at once, each its own shards. Nothing depends on which document lies in which shard.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from drafttrain.errors import StoreError, UserError
from drafttrain.files import read_json, write_json

SCHEMA = 1
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "fp8": torch.float8_e4m3fn}
_ID_BYTES = 8  # int32 token and int32 top1


@dataclass(frozen=True)
class StoreIdentity:
    """What features depend on. Two stores with equal identities are interchangeable.

    Attributes:
        target: name, for people.
        weights_hash, tokenizer_hash, template_hash: hex digests of the target's parts.
        taps: canonical names in the order in which they lie in a row; "final" is always among them.
        hidden_size: H.
        dtype: element type on disk: bfloat16, float32, or fp8 (e4m3 with a scale a token and tap).
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
        """The element type on disk."""
        return DTYPES[self.dtype]

    @property
    def scaled(self) -> bool:
        """Whether rows have scales."""
        return self.dtype == "fp8"

    @property
    def bytes_per_token(self) -> int:
        """What one token takes on disk."""
        scales = len(self.taps) if self.scaled else 0
        return self.width * self.torch_dtype.itemsize + scales + _ID_BYTES

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


@dataclass(frozen=True)
class Manifest:
    """What stands in manifest.json.

    Attributes:
        identity: what the store was made for.
        complete: everything that was asked for is there.
        counts: shards, documents and tokens of a complete store; empty while it is not.
    """

    identity: StoreIdentity
    complete: bool
    counts: dict[str, int]

    def write(self, path: Path) -> None:
        """Into the store at `path`, atomically."""
        write_json(
            path / "manifest.json", {"identity": asdict(self.identity), "complete": self.complete, **self.counts}
        )


def is_store(path: Path) -> bool:
    """Whether there is a manifest."""
    return (path / "manifest.json").exists()


def read_manifest(path: Path) -> Manifest:
    """The manifest of a store.

    Raises:
        StoreError: no manifest, or one that this version cannot read.
    """
    try:
        raw = read_json(path / "manifest.json")
    except UserError as error:
        if not (path / "shards").is_dir():
            raise StoreError(
                f"no feature store here: {error.what}",
                where=path / "manifest.json",
                remedy="check the path; `drafttrain features build RECIPE` makes a store",
            ) from None
        raise StoreError(
            f"the manifest of this store cannot be read: {error.what}",
            where=path / "manifest.json",
            remedy="put the manifest back, or build a store in another folder (features.path)",
        ) from None
    identity = raw.get("identity") if isinstance(raw, dict) else None
    found = identity.get("schema") if isinstance(identity, dict) else None
    if identity is None or found != SCHEMA:
        raise StoreError(
            f"the store has schema version {found}, this version reads {SCHEMA}",
            where=path,
            remedy="build it again in another folder (features.path)",
        )
    try:
        known = StoreIdentity(**{**identity, "taps": tuple(identity["taps"])})
        complete = bool(raw.get("complete"))
        counts = {name: int(raw[name]) for name in ("shards", "documents", "tokens")} if complete else {}
        if known.dtype not in DTYPES:
            raise KeyError(f"dtype {known.dtype}")
    except (TypeError, KeyError, ValueError) as error:
        raise StoreError(f"the manifest is damaged: {error}", where=path / "manifest.json") from None
    return Manifest(known, complete, counts)


def require_fit(path: Path, wanted: StoreIdentity, found: StoreIdentity) -> None:
    """Refuse a store that was made for something else, by the name of what differs."""
    differing = wanted.differences(found)
    if differing:
        raise StoreError(
            f"the store was made for another target or draft; what differs: {'; '.join(differing)}",
            where=path,
            remedy="give features.path another folder",
        )


def shard_folders(path: Path) -> list[Path]:
    """Folders of the shards that are whole, in order of their numbers."""
    return sorted(folder for folder in (path / "shards").glob("[0-9]*") if folder.is_dir())
