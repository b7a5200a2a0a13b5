"""Signs of life: a small file for each rank, and the verdict on a rank that died, failed or hangs.

    heartbeat/rank-00003.json    {"rank", "host", "machine", "pid", "step", "stage", "beats", "idle_s", "ended", ...}

Ranks wait for each other in collectives, so one that is gone or stuck holds up all. A thread, which a blocked
collective does not stop, looks at the others' files when nothing moves: the rank that is furthest behind is the one
that failed. It says so itself if it still can, else the lowest rank that lives says it, and all end.

Hosts have clocks of their own, which are set while runs run. So nothing is judged by the time of day: a rank counts how
long it has not moved, and another one for how long it has seen no newer file of it.

Before ranks train, one may answer prompts for days while the others wait: until then the dead alone are looked for.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from drafttrain.files import write_json

FOLDER = "heartbeat"
PREPARING = "preparing"
"""Stage of a rank that does not train yet."""
_BEAT_S = 10.0
_SUSPICION_S = 30.0
"""Nothing moved for so long: look whether all the others live."""
_SILENCE_S = 90.0
"""A rank on another host whose file has not changed for so long is dead."""
_LAST_WORDS_S = 20.0
"""How long the others wait for a rank to say why it failed."""
FAILED = 1
"""Exit status of ranks that end because another one failed."""


@dataclass
class Life:
    """What a rank writes about itself.

    Attributes:
        launch: common to all ranks of one launch.
        host, machine: its name for people, and what tells whether `pid` means anything here: containers on several
            hosts may share a name.
        step: optimiser steps done.
        stage: what it is doing, in words; `order` grows from stage to stage within a step.
        beats: how many files it has written, this one included; time: of this one, for people.
        idle_s: for how long neither step nor stage had changed then.
        ended: it is through and nobody waits for it.
        failed: its error, once it has shown it.
    """

    launch: str
    rank: int
    host: str
    machine: str
    pid: int
    step: int = 0
    order: int = 0
    stage: str = PREPARING
    beats: int = 0
    time: float = 0.0
    idle_s: float = 0.0
    ended: bool = False
    failed: str | None = None

    @property
    def name(self) -> str:
        """As an error names it."""
        return f"rank {self.rank} (host {self.host}, process {self.pid})"


class Heartbeat:
    """This rank's file, and its watch over the others while active.

    Args:
        folder: of the run.
        launch: common to all ranks of this launch.
        rank, count: this process.
        patience_s: in training without progress for so long, the run is ended; None waits for ever.
        tell: shows a message; called from a thread.
        end: ends this process; replaced in tests.
    """

    def __init__(
        self,
        folder: Path,
        launch: str,
        rank: int,
        count: int,
        *,
        patience_s: float | None,
        tell: Callable[[str], None],
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self.folder, self.count = folder / FOLDER, count
        self.life = Life(launch, rank, socket.gethostname(), _machine(), os.getpid())
        self._moved = time.monotonic()
        self._seen: dict[int, tuple[int, float]] = {}  # rank -> beats of its newest file, and when it was found here
        self._patience, self._tell, self._end = patience_s, tell, end
        self._stopped = threading.Event()
        self._broken = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self.beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._broken.set()
        self._thread.join(timeout=5)
        if error is None:
            self.life.ended = True
        elif self.life.failed is None:
            self.life.failed = str(error).splitlines()[0] if str(error) else type(error).__name__
        with suppress(OSError):  # a full disk was met before, where it is said what to do
            self.beat()

    def at(self, step: int, order: int, stage: str) -> None:
        """Say what this rank does now; costs nothing, the thread writes it down."""
        life = self.life
        life.step, life.order, life.stage, self._moved = step, order, stage, time.monotonic()

    def beat(self) -> None:
        """Write the file."""
        with self._lock:
            self.life.beats += 1
            self.life.time, self.life.idle_s = time.time(), time.monotonic() - self._moved
            write_json(self._path(self.life.rank), asdict(self.life))

    def peer_failed(self) -> None:
        """A collective broke off: wait for the verdict, which ends this process; returns if nothing is found."""
        self._broken.set()
        self._thread.join(timeout=_LAST_WORDS_S * 2)

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"

    def _run(self) -> None:
        while not self._broken.wait(_BEAT_S):
            try:
                self.beat()
            except OSError:
                continue  # a full disk ends the run where it writes what matters
            if self.count > 1 and time.monotonic() - self._moved > _SUSPICION_S:
                self._judge()
        deadline = time.monotonic() + _LAST_WORDS_S
        while not self._stopped.is_set() and time.monotonic() < deadline:
            self._judge()
            self._stopped.wait(0.5)

    def _judge(self) -> None:
        """End this process if some rank is dead, has failed, or hangs in training beyond patience."""
        lives = self.lives()
        if any(life.failed for life in lives):
            self._end(FAILED)  # it has said why
            return
        dead = [life for life in lives if self.is_dead(life)]
        if dead:
            self._speak(lives, dead, f"died at step {dead[0].step + 1} ({dead[0].stage}) without a word")
            return
        if self._patience is None or time.monotonic() - self._moved < self._patience:
            return
        moved = [life for life in lives if not life.ended]
        if any(life.stage == PREPARING for life in moved):
            return
        last = min((life.step, life.order) for life in moved)
        behind = [life for life in moved if (life.step, life.order) == last]
        seconds = behind[0].idle_s + self._silence(behind[0])
        if seconds >= self._patience:
            self._speak(lives, behind, f"has not moved for {seconds:.0f} s at step {last[0] + 1} ({behind[0].stage})")

    def _speak(self, lives: list[Life], guilty: list[Life], what: str) -> None:
        """One rank tells: the guilty one if it lives, else the lowest that does. Then all end."""
        able = [life for life in guilty if not self.is_dead(life)] or [life for life in lives if not self.is_dead(life)]
        if not able or able[0].rank == self.life.rank:
            self._tell(
                f"{guilty[0].name} {what}; the run ends\n  the log of that rank or of its host says more (memory?); "
                "the same command goes on from the last checkpoint"
            )
            self.life.failed = what
            self.beat()
        else:
            self._stopped.wait(_LAST_WORDS_S / 4)
        self._end(FAILED)

    def is_dead(self, life: Life) -> bool:
        """Whether a rank's process is gone: known at once on this machine, elsewhere by its silence."""
        if life.ended or life.failed:
            return False
        if life.machine == self.life.machine:
            return not _runs(life.pid)
        return self._silence(life) > _SILENCE_S

    def _silence(self, life: Life) -> float:
        """Seconds for which no newer file of its rank was found here."""
        return time.monotonic() - self._seen[life.rank][1]

    def lives(self) -> list[Life]:
        """What the ranks of this launch wrote, by rank; a file that is being replaced is left out."""
        found = []
        for rank in range(self.count):
            try:
                life = Life(**json.loads(self._path(rank).read_text(encoding="utf-8")))
            except (OSError, ValueError, TypeError):
                continue
            if life.launch == self.life.launch:
                found.append(life)
                if rank not in self._seen or self._seen[rank][0] != life.beats:
                    self._seen[rank] = life.beats, time.monotonic()
        return found


def _machine() -> str:
    """Where process numbers mean the same: one boot of a kernel, and one space of processes in it."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _runs(pid: int) -> bool:
    """Whether a process of this machine lives; one that nobody has buried yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    except OSError:
        return True
    return state not in "ZX"
