"""Errors of the processes of one launch: what several ranks of a host meet is shown by the first of them."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from contextlib import suppress
from pathlib import Path

from drafttrain.files import cache_dir, sha256_text

_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_KEPT = 100


def shown_by_another_rank(message: str) -> bool:
    """Whether another rank of this launch and host has shown the same error; if not, this one is to show it.

    Before ranks join they cannot talk to each other, and one may fail in a way of its own - a file that its host lacks,
    a package that does not load. So each leaves a note of what it shows, and one that meets a note left since it
    began says nothing. Where notes cannot be kept, every rank shows its errors.
    """
    if "RANK" not in os.environ:
        return False
    with suppress(OSError, ValueError):
        launch = [os.environ.get(name, "") for name in _LAUNCH]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return _noted(cache_dir() / f"shown-{platform.node()}.json", sha256_text(json.dumps([boot, launch, message])))
    return False


def tell_launcher(message: str) -> None:
    """Have torchrun, and accelerate through it, name this error as the cause when it ends the launch.

    It reads `{"message": {"message", "extraInfo": {"timestamp"}}}` from the file that it names to each process, and
    takes the earliest of those of its host.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        with suppress(OSError):
            cause = {"message": message, "extraInfo": {"timestamp": int(time.time())}}
            Path(path).write_text(json.dumps({"message": cause}), encoding="utf-8")


def _noted(path: Path, key: str) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        notes: dict[str, float] = {}
        with suppress(ValueError):
            notes = dict(json.loads(file.read()))
        if notes.get(key, -1.0) >= _began():
            return True
        # The newest last; those of launches long over go.
        notes.pop(key, None)
        notes = dict([*notes.items(), (key, time.clock_gettime(time.CLOCK_BOOTTIME))][-_KEPT:])
        file.truncate(0)
        file.write(json.dumps(notes))
    return False


def _began() -> float:
    """When this process was started, in seconds since the system was."""
    # Behind the name in parentheses, which may hold anything, the 22nd field of all is the 20th.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[19]) / os.sysconf("SC_CLK_TCK")
