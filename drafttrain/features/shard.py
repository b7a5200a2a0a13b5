"""One shard of a store: files side by side, an index, and the mapping of both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafttrain.corpus.types import Sample
from drafttrain.errors import StoreError, UserError
from drafttrain.features.capture import UNKNOWN, check_features
from drafttrain.features.codec import decode_fp8, encode_fp8
from drafttrain.features.store import StoreIdentity
from drafttrain.features.transfer import to_device
from drafttrain.files import read_json, sha256_file, write_json
from drafttrain.modeling.taps import Tap

FEATURES, SCALES, IDS, TOP1 = "features.bin", "scales.bin", "ids.bin", "top1.bin"


@dataclass(frozen=True)
class Rows:
    """L rows as they lie on disk.

    Attributes:
        features: [L, taps * H]; bytes (uint8) where they are scaled.
        scales: int8 [L, taps] of fp8 rows, else None.
        ids: int32 [L].
        top1: int32 [L].
    """

    features: Tensor
    scales: Tensor | None
    ids: Tensor
    top1: Tensor

    @staticmethod
    def encode(identity: StoreIdentity, sample: Sample, features: dict[Tap, Tensor], top1: Tensor | None) -> Rows:
        """Rows of a document of L tokens, on the CPU.

        Args:
            features: tap -> [L, H] for every tap of the identity.
            top1: int64 [L], or None.

        Raises:
            DataError: features that are not finite, or another number of rows than L.
        """
        check_features(sample, features)
        by_name = {str(tap): value for tap, value in features.items()}
        parts = [by_name[name] for name in identity.taps]
        scales = None
        if identity.scaled:
            coded = [encode_fp8(part) for part in parts]
            parts = [codes for codes, _ in coded]
            scales = torch.stack([exponents for _, exponents in coded], dim=-1).cpu()
            row = torch.cat(parts, dim=-1).cpu()
        else:
            row = torch.cat(parts, dim=-1).to("cpu", identity.torch_dtype)
        known = torch.full((len(sample.ids),), UNKNOWN) if top1 is None else top1
        return Rows(row, scales, torch.from_numpy(sample.ids.astype(np.int32)), known.to("cpu", torch.int32))

    def decode(self, identity: StoreIdentity, taps: Sequence[Tap], device: torch.device | str) -> dict[Tap, Tensor]:
        """tap -> [L, H] on `device`; fp8 is moved as bytes, and becomes bfloat16 there."""
        found = {}
        for tap in taps:
            at = identity.taps.index(str(tap))
            values = to_device(self.features[:, at * identity.hidden_size : (at + 1) * identity.hidden_size], device)
            found[tap] = values if self.scales is None else decode_fp8(values, to_device(self.scales[:, at], device))
        return found

    def columns(self) -> dict[str, Tensor]:
        """File name -> tensor."""
        columns = {FEATURES: self.features, IDS: self.ids, TOP1: self.top1}
        return columns if self.scales is None else {**columns, SCALES: self.scales}

    def slice(self, rows: slice) -> Rows:
        """Some of the rows, as views."""
        scales = None if self.scales is None else self.scales[rows]
        return Rows(self.features[rows], scales, self.ids[rows], self.top1[rows])


def write_shard(folder: Path, documents: Sequence[tuple[Sample, Rows]]) -> None:
    """Write files and index into an existing folder. One document after the other: no second copy in memory."""
    entries, start = [], 0
    for sample, rows in documents:
        spans = [[int(first), int(last)] for first, last in sample.spans]
        entries.append({"id": sample.id, "start": start, "tokens": len(sample.ids), "spans": spans})
        start += len(rows.ids)
    files = {}
    for name in documents[0][1].columns():
        with (folder / name).open("wb") as file:
            for _, rows in documents:
                # Not numpy's tofile: its error on a full disk does not say so.
                file.write(rows.columns()[name].contiguous().view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
    write_json(folder / "index.json", {"tokens": start, "files": files, "documents": entries})


def check_shard(folder: Path, verify: str) -> dict[str, Any]:
    """The shard's index, once its files are found to be what the index says.

    Args:
        verify: "checksum" hashes every file, "size" compares sizes only.

    Raises:
        StoreError: truncated, damaged, or without an index; names the shard.
    """
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


def map_shard(folder: Path, identity: StoreIdentity, tokens: int) -> Rows:
    """All rows of a shard as memory maps; they hold no file open, and live as long as a view of them."""

    def column(name: str, dtype: torch.dtype, *width: int) -> Tensor:
        size = tokens * (width[0] if width else 1)
        return torch.from_file(str(folder / name), size=size, dtype=dtype).view(tokens, *width)

    return Rows(
        features=column(FEATURES, torch.uint8 if identity.scaled else identity.torch_dtype, identity.width),
        scales=column(SCALES, torch.int8, len(identity.taps)) if identity.scaled else None,
        ids=column(IDS, torch.int32),
        top1=column(TOP1, torch.int32),
    )


def read_ahead(folder: Path, identity: StoreIdentity, rows: slice) -> None:
    """Ask the kernel to read the features of some rows soon; returns at once."""
    width = identity.width * identity.torch_dtype.itemsize
    handle = os.open(folder / FEATURES, os.O_RDONLY)
    try:
        os.posix_fadvise(handle, rows.start * width, (rows.stop - rows.start) * width, os.POSIX_FADV_WILLNEED)
    finally:
        os.close(handle)
