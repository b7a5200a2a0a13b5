"""A folder through which vLLM hands over states: a safetensors file a request, and a lock while it is written."""

from __future__ import annotations

import fcntl
import time
from contextlib import suppress
from pathlib import Path
from threading import Event

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.errors import FeatureServerError
from drafttrain.features.client import Lost

_POLL_S = (0.001, 0.05)
SETTLE_S = 10.0
"""How long a file may take to show, or to be whole, when nobody holds its lock: shared file systems lag."""


class Exchange:
    """The client's side. Servers write, and never remove anything.

    Args:
        folder: as this machine sees it; made when it does not exist.
        timeout_s: seconds after which a file that is still being written counts as lost.
        closed: set when nothing is to be waited for any more.

    Raises:
        FeatureServerError: no folder can be made there.
    """

    def __init__(self, folder: str | Path, timeout_s: float, closed: Event) -> None:
        self.folder, self._timeout_s, self._closed = Path(folder), timeout_s, closed
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FeatureServerError(
                f"no folder to exchange states through: {error.strerror}",
                where=self.folder,
                remedy="name another one in features.exchange, and in the servers' shared_storage_path",
            ) from None

    def take(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file once it is whole; it is removed, however this ends.

        Raises:
            FeatureServerError: there is no such file, or it may not be removed.
            Lost: the server did not write it whole.
        """
        path, lock = self.folder / name, self.folder / f"{name}.lock"
        try:
            return self._wait(path, lock)
        finally:
            self._remove(path, lock)

    def sweep(self, prefix: str) -> None:
        """Remove what was written for requests of that name whose answers nobody took."""
        for left in self.folder.glob(f"*{prefix}*"):
            with suppress(OSError):
                left.unlink()

    def _wait(self, path: Path, lock: Path) -> dict[str, Tensor]:
        began, unlocked_since, pause = time.monotonic(), None, _POLL_S[0]
        while True:
            held = _is_held(lock)
            if not held:
                with suppress(FileNotFoundError, SafetensorError):  # not there, or not whole yet
                    return load_file(path)
                unlocked_since = unlocked_since or time.monotonic()
                if time.monotonic() - unlocked_since > min(SETTLE_S, self._timeout_s):
                    raise self._missing(path, locked_before=held is False)
            elif time.monotonic() - began > self._timeout_s:
                raise Lost(f"{path} is still being written after {self._timeout_s:.0f} s")
            if self._closed.wait(pause):
                raise Lost("training ended while states were written")
            pause = min(2 * pause, _POLL_S[1])

    def _missing(self, path: Path, *, locked_before: bool) -> Exception:
        if locked_before or path.exists():
            return Lost(f"{path} was not written whole: is the disk full?")
        return FeatureServerError(
            f"says that it wrote {path.name}, which is not there",
            where=path.parent,
            remedy="features.exchange has to be the folder that the server knows as its shared_storage_path",
        )

    def _remove(self, path: Path, lock: Path) -> None:
        for file in (path, lock):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise FeatureServerError(
                    f"what was read cannot be removed, and would fill the disk: {error.strerror}",
                    where=file,
                    remedy="run the server and the training as one user, or make the folder writable for both",
                ) from None


def _is_held(lock: Path) -> bool | None:
    """Whether a server is writing; None where there is no lock."""
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        return True
    return False
