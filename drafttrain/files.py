"""Files that are whole or absent: atomic writes, hashes, JSON lines, bundled resources."""

from __future__ import annotations

import ctypes
import difflib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drafttrain.errors import UserError

_CHECKOUT = Path(__file__).resolve().parent.parent
_BUNDLED = Path(__file__).resolve().parent / "_bundled"
# Of Linux's renameat2.
_AT_CWD, _RENAME_EXCHANGE = -100, 2

CACHE_REMEDY = "set DRAFTTRAIN_CACHE to a folder that can be written to"


def cache_dir() -> Path:
    """Where converted models and tokenised corpora live: `DRAFTTRAIN_CACHE`, else the user's cache folder."""
    explicit = os.environ.get("DRAFTTRAIN_CACHE")
    try:
        if explicit:
            return Path(explicit).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "drafttrain"
    except RuntimeError:  # containers run with users that the system does not know
        raise UserError("this user has no home folder", where="~", remedy=CACHE_REMEDY) from None


def find_resource(name: str | Path) -> Path:
    """Resolve a file that ships with the project: the path as given, then the checkout, then the wheel's copy."""
    given = Path(name).expanduser()
    for candidate in (given, _CHECKOUT / name, _BUNDLED / name):
        if candidate.exists():
            return candidate
    if given.is_absolute():
        raise UserError("no such file", where=given, remedy=f"check the path{_near(given)}")
    places = list(dict.fromkeys((Path.cwd(), _CHECKOUT if (_CHECKOUT / "recipes").is_dir() else _BUNDLED)))
    near = next((found for place in places if (found := _near(place / given))), "")
    raise UserError("no such file", where=given, remedy=f"looked in {' and '.join(map(str, places))}{near}")


def _near(path: Path) -> str:
    """A file whose name is like that of one that is missing, for an error."""
    folder = path.parent
    found = difflib.get_close_matches(path.name, os.listdir(folder), 1) if folder.is_dir() else []
    return f"; did you mean {found[0]!r}?" if found else ""


@contextmanager
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; rename it into place if the block succeeds, delete it otherwise."""
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    with named(final):
        handle, name = tempfile.mkstemp(prefix=f".{final.name}.", suffix=".part", dir=final.parent)
    os.close(handle)
    partial = Path(name)
    try:
        with named(final):
            yield partial
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            # mkstemp makes files private; results are meant to be shared as the umask says.
            partial.chmod(0o666 & ~_umask())
            partial.replace(final)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | Path, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `path`; rename it into place if the block succeeds.

    Args:
        path: must not exist, unless `replace`.
        replace: swap with the folder that is there, which goes only once the new one is in its place. Who reads it
            asks `settled` for it.
    """
    final = Path(path)
    if final.exists() and not replace:
        raise UserError("already exists", where=final, remedy="choose another folder or remove this one")
    final.parent.mkdir(parents=True, exist_ok=True)
    with named(final):
        partial = Path(tempfile.mkdtemp(prefix=f".{final.name}.", suffix=".part", dir=final.parent))
    try:
        with named(final):
            yield partial
            partial.chmod(0o777 & ~_umask())
            for file in partial.rglob("*"):
                # safetensors makes its files private, too; a server often runs as another user.
                if file.is_file() and not file.is_symlink():
                    file.chmod(0o666 & ~_umask())
            if final.exists():
                _exchange(partial, final)
            else:
                partial.replace(final)
            shutil.rmtree(_aside(final), ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def settled(path: str | Path) -> Path:
    """The folder `path`, or the one that was to be replaced if a kill came between the two renames of that."""
    final = Path(path)
    return _aside(final) if not final.exists() and _aside(final).exists() else final


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _exchange(new: Path, final: Path) -> None:
    """Put `new` in the place of `final`, in one step where the system can: then the name is never without a folder.

    What was there lies under the name of `new` then, else aside.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    exchange = getattr(libc, "renameat2", None)
    names = (_AT_CWD, os.fsencode(new), _AT_CWD, os.fsencode(final), _RENAME_EXCHANGE)
    if exchange is not None and exchange(*names) == 0:
        return
    aside = _aside(final)
    shutil.rmtree(aside, ignore_errors=True)
    final.rename(aside)
    try:
        new.rename(final)
    except OSError:
        aside.rename(final)
        raise


@contextmanager
def named(final: Path) -> Iterator[None]:
    """Have errors of the disk name what was to be written: a failed write names nothing, others the temporary path."""
    try:
        yield
    except OSError as error:
        # With a filename, an error without a number would lose its message.
        if error.errno is not None and (error.filename is None or ".part" in str(error.filename)):
            error.filename = str(final)
        raise


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold the lock file `path`, waiting for whoever holds it; it ends with the process however that ends."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


@contextmanager
def exclusive(path: str | Path, what: str) -> Iterator[None]:
    """Hold the lock file `path`, which ends with the process however that ends; refuse where another holds it.

    Args:
        path: is created and stays.
        what: the holder does, for the error: "training into this folder".

    Raises:
        UserError: another holds it.
        OSError: no file can be made there; it names the folder.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        opened = file.open("a", encoding="utf-8")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.parent)) from None
    with opened as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process is {what}", where=file.parent, remedy="wait for it, stop it, or choose another folder"
            ) from None
        yield


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def sha256_file(path: str | Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_text(text: str) -> str:
    """Hex SHA-256 of a string's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def parse_json(text: str | bytes) -> Any:
    """A JSON text's value; a ValueError where it is none, or nested more deeply than the parser goes."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: str | Path) -> Any:
    """Parse a JSON file; a file that is missing or not JSON is a `UserError` that names it."""
    try:
        return parse_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("no such file", where=path) from None
    except ValueError as error:
        raise UserError(f"not valid JSON: {error}", where=path) from None


def read_object(path: str | Path) -> dict[str, Any]:
    """Parse a JSON file that holds an object; anything else is a `UserError` that names it."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise UserError("holds no JSON object", where=path)
    return value


def write_json(path: str | Path, value: Any) -> None:
    """Write indented JSON atomically."""
    with atomic_file(path) as partial:
        partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_jsonl(path: str | Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, value) for each non-empty line; one that a kill tore off at the end is passed over."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield number, parse_json(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise UserError(f"line {number} is not valid JSON: {error}", where=path) from None


def append_jsonl(path: str | Path, value: Any) -> None:
    """Append one line in a single write, so that a kill leaves whole lines but for the last one at worst."""
    with named(Path(path)), Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")


def size_text(nbytes: float) -> str:
    """Bytes for people, in binary units: 512 B, 37.2 MiB, 1,536.0 TiB."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1024:
            return f"{nbytes:,.1f} {unit}"
    return f"{nbytes / 1024:,.1f} TiB"


def require_free_space(path: str | Path, needed: int) -> None:
    """Refuse before writing when the disk under `path` has fewer than `needed` bytes free."""
    folder = Path(path)
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UserError(
            f"needs {size_text(needed)}, the disk has {size_text(free)} free",
            where=path,
            remedy="free some space or point the output to another disk",
        )
