"""Tokenised samples that stay on disk: memory maps, of which the system keeps in memory what is used.

tokens.bin      int32 [tokens], sample behind sample
ends.npy        int64 [samples], where each ends
spans.npy       int32 [spans, 2], first and last token of each span within its sample
span_ends.npy   int64 [samples], where the spans of each end
names.bin       UTF-8, the samples' ids behind each other
name_ends.npy   int64 [samples], where each ends
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from drafttrain.corpus.types import Sample


class SampleTable(Sequence[Sample]):
    """The samples in a folder that `write_samples` filled, made each time they are asked for.

    Raises:
        ValueError, OSError: files that are missing or do not fit together.
    """

    def __init__(self, folder: Path) -> None:
        self._ends, self._span_ends, self._name_ends, self._spans = (
            np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            for name in ("ends", "span_ends", "name_ends", "spans")
        )
        self._tokens = np.memmap(folder / "tokens.bin", dtype=np.int32, mode="r")
        self._names = np.memmap(folder / "names.bin", dtype=np.uint8, mode="r")
        for values, ends in (
            (self._tokens, self._ends),
            (self._spans, self._span_ends),
            (self._names, self._name_ends),
        ):
            if len(ends) != len(self._ends) or len(values) != ends[-1]:
                raise ValueError("lengths differ")

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Sample: ...

    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...

    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        name = bytes(_part(self._names, self._name_ends, index)).decode()
        spans = [(int(first), int(last)) for first, last in _part(self._spans, self._span_ends, index)]
        # A plain array: a memory map's type makes each slice of it dear.
        return Sample(name, np.asarray(_part(self._tokens, self._ends, index)), spans)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample."""
        lengths: NDArray[np.int64] = np.diff(self._ends, prepend=0)
        return lengths

    @property
    def supervised(self) -> int:
        """Tokens inside spans, of all samples."""
        return int((self._spans[:, 1].astype(np.int64) - self._spans[:, 0] + 1).sum())


def _part(values: Any, ends: Any, index: int) -> Any:
    return values[int(ends[index - 1]) if index else 0 : int(ends[index])]


def lengths_of(samples: Sequence[Sample]) -> NDArray[np.int64]:
    """Tokens of each sample."""
    if isinstance(samples, SampleTable):
        return samples.lengths
    return np.array([len(sample.ids) for sample in samples], dtype=np.int64)


def write_samples(samples: Iterable[Sample], folder: Path) -> int:
    """Write samples as they come; how many there were.

    Args:
        folder: exists, and is empty.
    """
    ends, span_ends, name_ends, spans = array("q"), array("q"), array("q"), array("i")
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "names.bin").open("wb") as names:
        for sample in samples:
            tokens.write(sample.ids.astype(np.int32).tobytes())
            names.write(sample.id.encode())
            spans.extend(position for span in sample.spans for position in span)
            ends.append((ends[-1] if ends else 0) + len(sample.ids))
            span_ends.append(len(spans) // 2)
            name_ends.append(names.tell())
    for name, values in (("ends", ends), ("span_ends", span_ends), ("name_ends", name_ends)):
        np.save(folder / f"{name}.npy", np.asarray(values, dtype=np.int64))
    np.save(folder / "spans.npy", np.asarray(spans, dtype=np.int32).reshape(-1, 2))
    return len(ends)
