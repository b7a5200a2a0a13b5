"""Who may write to a store: the processes of one job together, another job not at all.

A job is known by a digest of what it writes, so its processes need not talk to each other: they hold one lock in
common, with the job's name in it, and each a lock of its own. The system takes locks back from a killed process.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from drafttrain.errors import StoreError

LOCK = "writing.lock"
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Part:
    """Which share of a job a process writes: part `index`, from 0, of `count`."""

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"part {self.index + 1} of {self.count}"


WHOLE = Part()


class WriteLock:
    """Held while a store is written to.

    Args:
        path: folder of the store; exists.
        job: names the job; equal for its processes.
        part: of this process; no two hold the same.
        when_alone: called if no other process is writing, before one can begin.

    Raises:
        StoreError: another job, or another process with this part, is writing.
    """

    def __init__(self, path: Path, job: str, part: Part, when_alone: Callable[[], None]) -> None:
        self.path = path
        # Kept in the order in which they were taken.
        self._held: list[IO[str]] = []
        try:
            self._join(f"{job} in {part.count}", when_alone)
            mine = self._open(f"writing.{part.index}.lock")
            if not _try(mine, fcntl.LOCK_EX):
                raise self._refusal(f"{part} of this job is being written by another process")
        except BaseException:
            self.release()
            raise

    def _join(self, job: str, when_alone: Callable[[], None]) -> None:
        common = self._open(LOCK)
        until = time.monotonic() + _PATIENCE_S
        while True:
            if _try(common, fcntl.LOCK_EX):
                when_alone()
                common.truncate(0)
                who = {"job": job, "host": platform.node(), "pid": os.getpid(), "since": time.strftime("%F %T")}
                common.write(json.dumps(who))
                common.flush()
            # Not atomic after an exclusive lock: another job may have come between, so what stands is read again.
            if _try(common, fcntl.LOCK_SH):
                if _read(self.path).get("job") == job:
                    return
                raise self._refusal("the store is being written by another job")
            if time.monotonic() > until:
                raise self._refusal("the store is being prepared by another process")
            time.sleep(0.05)

    def _open(self, name: str) -> IO[str]:
        file = (self.path / name).open("a+", encoding="utf-8")
        self._held.append(file)
        return file

    def _refusal(self, what: str) -> StoreError:
        return StoreError(
            f"{what} ({last_writer(self.path)})", where=self.path, remedy="wait for it, stop it, or use another folder"
        )

    def release(self) -> None:
        """Let others write. More than once does no harm."""
        while self._held:
            self._held.pop().close()


def last_writer(path: Path) -> str:
    """Who wrote to a store last, or writes now."""
    who = _read(path)
    return f"process {who['pid']} on {who['host']}, since {who['since']}" if "pid" in who else "nobody known"


def is_lock(name: str) -> bool:
    """Whether a file of a store's folder is one of its locks."""
    return name.startswith("writing.") and name.endswith(".lock")


def _try(file: IO[str], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads((path / LOCK).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
