"""Records that stay on disk: a data set of any size, of which 8 bytes a record are held in memory."""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, Generic, TypeVar, overload

from drafttrain.files import cache_dir, named

T = TypeVar("T")


class Lines(Sequence[T], Generic[T]):
    """Lines of an open JSONL file as records, parsed each time they are asked for.

    Args:
        file: stays open as long as the records are wanted; may have no name any more.
        starts: where the lines begin, in the order of the records.
        parse: makes a record of a line's value.
    """

    def __init__(self, file: IO[bytes], starts: array[int], parse: Callable[[Any], T]) -> None:
        self._file, self._starts, self._parse = file, starts, parse

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Lines[T]: ...

    def __getitem__(self, index: int | slice) -> T | Lines[T]:
        if isinstance(index, slice):
            return Lines(self._file, self._starts[index], self._parse)
        self._file.seek(self._starts[index])
        return self._parse(json.loads(self._file.readline()))

    def __iter__(self) -> Iterator[T]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        """Whether the records are the same, one after the other."""
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == its for mine, its in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def pick(self, indices: Iterable[int]) -> Lines[T]:
        """Those records, in that order."""
        return Lines(self._file, array("q", (self._starts[index] for index in indices)), self._parse)


def write_lines(records: Iterable[T], to_json: Callable[[T], Any], parse: Callable[[Any], T]) -> Lines[T]:
    """Put records into a file without a name, which goes with the process.

    Args:
        to_json: a record as JSON; `parse` is its inverse.
    """
    # Not where the system keeps its small temporary files: a data set may be larger than that place.
    place = cache_dir()
    place.mkdir(parents=True, exist_ok=True)
    file: IO[bytes] = tempfile.TemporaryFile(dir=place)  # noqa: SIM115  it belongs to what is returned
    starts, end = array("q"), 0
    for record in records:
        starts.append(end)
        line = json.dumps(to_json(record), ensure_ascii=False).encode() + b"\n"
        with named(place):
            end += file.write(line)
    with named(place):
        file.flush()
    return Lines(file, starts, parse)


def pick(records: Sequence[T], indices: Iterable[int]) -> Sequence[T]:
    """Those records, in that order, left where they are."""
    return records.pick(indices) if isinstance(records, Lines) else [records[index] for index in indices]
