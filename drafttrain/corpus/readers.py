"""Prompts and conversations from files, folders and `datasets` names. Rows in = rows out + named rejects."""

from __future__ import annotations

import csv
import gzip
import io
import json
import logging
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Generic, TypeVar

from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.config import PromptSource
from drafttrain.corpus.lines import pick, write_lines
from drafttrain.corpus.shapes import Dialogue, ShapeError, is_row, parse_row, to_conversation, to_prompt
from drafttrain.corpus.synthesis import synthesise
from drafttrain.corpus.types import Conversation, Prompt, Reject, TokenGenerator
from drafttrain.errors import DataError, UserError
from drafttrain.files import atomic_file, find_resource, parse_json

T = TypeVar("T", Prompt, Conversation)

_log = logging.getLogger(__name__)

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
_GZIP = ".gz"
_PACKED = (_GZIP, ".zst", ".bz2", ".xz", ".zip", ".tar", ".tgz")
_UNPACK = (
    "unpack it: of packed files those are read whose names end in .jsonl.gz, .json.gz, .csv.gz, .tsv.gz or .txt.gz"
)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_LARGEST_CELL = 1 << 30  # csv's own limit of 128 KiB is below a long document


@dataclass
class ReadResult(Generic[T]):
    """What was read: rows = items + rejects + unused (sound rows that `count` left out). Items stay on disk."""

    items: Sequence[T] = ()
    rejects: list[Reject] = field(default_factory=list)
    unused: int = 0


@dataclass(frozen=True)
class _Bad:
    """A line that could not even be parsed."""

    reason: str


def read_prompts(source: PromptSource) -> ReadResult[Prompt]:
    """Prompts of one source other than `self`; given answers are dropped. DataError if none is usable."""
    return _read(source, to_prompt, Prompt)


def read_conversations(source: PromptSource) -> ReadResult[Conversation]:
    """Conversations with the answers they were given. DataError if none is usable."""
    return _read(source, to_conversation, Conversation)


def collect_prompts(
    sources: Sequence[PromptSource],
    *,
    chat: ChatRenderer | None = None,
    generator: TokenGenerator | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ReadResult[Prompt]:
    """Prompts of all sources in order, with ids that are unique among them.

    Args:
        chat, generator: needed for `self` sources only.
        progress: told (done, all) of each `self` source.
    """
    result = ReadResult[Prompt]()

    def items() -> Iterator[Prompt]:
        used: dict[str, int] = {}
        for source in sources:
            for item in _prompts_of(source, result, chat, generator, progress):
                yield replace(item, id=_unique(item.id, used))

    result.items = write_lines(items(), Prompt.to_json, Prompt.from_json)
    return result


def _prompts_of(
    source: PromptSource,
    result: ReadResult[Prompt],
    chat: ChatRenderer | None,
    generator: TokenGenerator | None,
    progress: Callable[[int, int], None] | None,
) -> Sequence[Prompt]:
    if source.source != "self":
        found = read_prompts(source)
        result.rejects += found.rejects
        result.unused += found.unused
        return found.items
    if chat is None or generator is None or source.count is None:
        raise DataError("source 'self' needs a target that can generate", where="data.prompts")
    return synthesise(
        generator,
        chat,
        source.count,
        seed=source.seed,
        temperature=source.temperature,
        top_p=source.top_p,
        max_new_tokens=source.max_new_tokens,
        progress=progress,
    )


def write_prompts(path: str | Path, prompts: Iterable[Prompt]) -> None:
    """Write a prompt set as JSONL that `read_prompts` gives back."""
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps(prompt.to_json(), ensure_ascii=False) + "\n")


def _read(source: PromptSource, build: Callable[[Dialogue, str, dict[str, Any]], T], kind: type[T]) -> ReadResult[T]:
    result = ReadResult[T]()

    def items() -> Iterator[T]:
        used: dict[str, int] = {}
        for number, (where, row) in enumerate(_rows(source)):
            stem = Path(source.source.removesuffix(_GZIP)).stem
            name = f"{stem}-{number}"
            try:
                if isinstance(row, _Bad):
                    raise ShapeError(row.reason)
                dialogue = parse_row(row, source.format, source.columns, source.system)
                name = dialogue.id or name
                item = build(dialogue, _unique(name, used), {"source": stem, **dialogue.meta})
            except ShapeError as error:
                result.rejects.append(Reject(name, str(error), where))
                continue
            yield item

    result.items = write_lines(items(), kind.to_json, kind.from_json)
    if source.count is not None and source.count < len(result.items):
        # Not the first ones: prompt sets are often sorted by category.
        chosen = sorted(random.Random(source.seed).sample(range(len(result.items)), source.count))
        result.unused = len(result.items) - source.count
        result.items = pick(result.items, chosen)
    if not result.items:
        first = f"; the first: {result.rejects[0].reason}" if result.rejects else ""
        raise DataError(
            f"holds no usable row ({len(result.rejects)} refused{first})",
            where=source.source,
            remedy="known shapes: OpenAI messages, ShareGPT, Alpaca, prompt/completion, text; "
            "rename columns with `columns`",
        )
    return result


def _unique(name: str, used: dict[str, int]) -> str:
    """`name`, or `name#2` and so on; `used` counts what was given, so that a constant id costs no search."""
    chosen = name
    while chosen in used:
        used[name] += 1
        chosen = f"{name}#{used[name]}"
    used[chosen] = 1
    return chosen


def _rows(source: PromptSource) -> Iterator[tuple[str, Any]]:
    """(where, row) of a source, in order."""
    name = source.source
    looks_like_path = name.startswith((".", "/", "~")) or name.lower().endswith(_SUFFIXES + _PACKED)
    try:
        path = find_resource(name)
    except UserError as error:
        if looks_like_path:
            raise DataError(error.what, where=error.where, remedy=error.remedy) from None
        yield from _hub_rows(source)
        return
    if path.is_file():
        yield from _file_rows(path, source.split)
    elif _is_saved(path):
        yield from _saved_rows(path, source.split)
    elif not path.is_dir():
        raise DataError("is neither a file nor a folder", where=path, remedy="give a file on disk")
    else:
        files, packed = _files_below(path)
        left_out = f"not read, being packed: {', '.join(str(file.relative_to(path)) for file in packed)}"
        if not files:
            raise DataError(
                f"the folder holds no data file ({', '.join(_SUFFIXES)}){f'; {left_out}' if packed else ''}",
                where=path,
                remedy=_UNPACK if packed else None,
            )
        if packed:
            _log.warning("%s: %s", path, left_out)
        for file in files:
            yield from _file_rows(file, source.split)


def files_of(folder: Path) -> list[Path]:
    """What is read of a folder, in order of names."""
    if _is_saved(folder):
        # What `datasets` itself leaves beside the data is none.
        return sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("cache-"))
    return _files_below(folder)[0]


def _is_saved(folder: Path) -> bool:
    """Whether `datasets` saved it."""
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()


def _files_below(folder: Path) -> tuple[list[Path], list[Path]]:
    """Data files of a folder and of those below, and packed files that are not read. Links are followed, but no folder
    is read twice."""

    def cannot(error: OSError) -> None:
        raise error

    found: list[Path] = []
    packed: list[Path] = []
    seen: set[str] = set()
    for place, below, names in os.walk(folder, onerror=cannot, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        files = [file for name in names if (file := Path(place) / name).is_file() or file.is_symlink()]
        found += [file for file in files if _kind(file)]
        packed += [file for file in files if not _kind(file) and file.suffix.lower() in _PACKED]
    return sorted(found), sorted(packed)


def _kind(path: Path) -> str:
    """The suffix that says how a file is read, "" if it is not."""
    name = path.name.lower()
    suffix = Path(name.removesuffix(_GZIP)).suffix
    if suffix == ".parquet" and name.endswith(_GZIP):  # is read from its end
        return ""
    return suffix if suffix in _SUFFIXES else ""


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path) if path.suffix.lower() == _GZIP else path.open("rb")  # type: ignore[return-value]


def _file_rows(path: Path, split: str) -> Iterator[tuple[str, Any]]:
    suffix = _kind(path)
    try:
        if suffix in (".jsonl", ".ndjson"):
            yield from _json_lines(path)
        elif suffix == ".json":
            yield from _numbered(path, _json_list(path, split))
        elif suffix in (".csv", ".tsv"):
            csv.field_size_limit(_LARGEST_CELL)
            with _open(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
                # Strict, or an unclosed quote would swallow the rows to the file's end in one cell.
                reader = csv.DictReader(file, delimiter="\t" if suffix == ".tsv" else ",", strict=True)
                yield from _numbered(path, (_cells(row) for row in reader))
        elif suffix == ".parquet":
            yield from _numbered(path, _parquet_rows(path))
        elif suffix == ".txt":
            with _open(path) as raw, io.TextIOWrapper(raw, encoding="utf-8-sig") as file:
                yield from _numbered(path, (line.rstrip("\n") for line in file if line.strip()))
        else:
            packed = path.suffix.lower() in _PACKED
            remedy = _UNPACK if packed else f"known: {', '.join(_SUFFIXES)}"
            raise DataError(
                "is packed in a way that is not read" if packed else "unknown kind of file", where=path, remedy=remedy
            )
    except UnicodeDecodeError as error:
        raise DataError(f"is not UTF-8 text: {error}", where=path, remedy="convert it to UTF-8") from None
    except csv.Error as error:
        raise DataError(
            f"is not valid CSV: {error}", where=path, remedy="close each quote, and double quotes inside of a cell"
        ) from None
    except (OSError, EOFError, zlib.error) as error:  # the last two of a gzip file that is damaged
        raise DataError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where=path) from None


def _numbered(path: Path, rows: Any) -> Iterator[tuple[str, Any]]:
    for number, row in enumerate(rows, 1):
        yield f"{path}:{number}", row


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line.startswith(_UTF16):
                raise DataError("is UTF-16 text, not UTF-8", where=path, remedy="convert it to UTF-8")
            if not line.strip():
                continue
            try:
                yield f"{path}:{number}", parse_json(line)
            except ValueError as error:
                yield f"{path}:{number}", _Bad(f"is not valid JSON: {error}")


def _json_list(path: Path, split: str) -> list[Any]:
    """A list of rows, an object that holds one (`data`, `rows`, the split's name beside others), or a row."""
    try:
        with _open(path) as file:
            value = parse_json(file.read())
    except ValueError as error:
        raise DataError(f"not valid JSON: {error}", where=path) from None
    if isinstance(value, dict):
        lists = {name: held for name, held in value.items() if isinstance(held, list)}
        if is_row(value):
            value = [value]
        elif len(lists) == 1:
            (value,) = lists.values()
        else:
            value = lists.get(split, [value])
    if not isinstance(value, list):
        raise DataError("holds no list of rows", where=path)
    return value


def _cells(row: dict[str | None, Any]) -> dict[str, Any] | _Bad:
    if None in row:
        return _Bad("has more cells than the header")
    return {str(key): value for key, value in row.items() if value not in ("", None)}


def _parquet_rows(path: Path) -> Iterator[Any]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise _lacks_extra(path, error) from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except arrow.ArrowException as error:
        raise DataError(f"is no readable Parquet file: {error}", where=path) from None


def _saved_rows(path: Path, split: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise _lacks_extra(path, error) from None
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # the reader raises types of its own and of pyarrow
        raise DataError(
            f"is no readable saved data set: {error}", where=path, remedy="save it again with `save_to_disk`"
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise DataError(f"has no split {split!r} (it has {', '.join(map(str, loaded))})", where=path)
        loaded = loaded[split]
    yield from _numbered(path, loaded)


def _hub_rows(source: PromptSource) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise _lacks_extra(source.source, error) from None
    try:
        loaded = datasets.load_dataset(source.source, source.subset, split=source.split)
    except Exception as error:  # the hub client raises its own, those of its HTTP library, and plain ones
        raise DataError(
            f"is neither a file nor a data set that could be loaded: {error}",
            where=source.source,
            remedy="check the name and the network, or download it and give the folder",
        ) from error
    yield from _numbered(Path(source.source), loaded)


def _lacks_extra(where: str | Path, error: ImportError) -> DataError:
    return DataError(
        f"cannot be read: the package {error.name} is not installed",
        where=where,
        remedy="pip install 'drafttrain[data]', or give a JSONL or CSV file that exists",
    )
