"""Processes beside a test: the ranks of a launch on one machine, and forks of the test itself."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_ranks(
    arguments: Sequence[str],
    ranks: int,
    environment: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    own: Mapping[int, Sequence[str]] | None = None,
    own_cwd: Mapping[int, Path] | None = None,
) -> list[subprocess.Popen[str]]:
    """One process a rank, each with `python ARGUMENTS`.

    Args:
        own: rank -> arguments for it alone, behind the common ones.
        own_cwd: rank -> its working directory.
    """
    common = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        **(environment or {}),
    }
    return [
        subprocess.Popen(
            [sys.executable, *arguments, *(own or {}).get(rank, ())],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=(own_cwd or {}).get(rank, cwd),
        )
        for rank in range(ranks)
    ]


def finish(processes: Sequence[subprocess.Popen[str]], timeout: float = 800) -> list[tuple[int, str]]:
    """(exit status, output) of each rank; all are killed when the time is over."""
    try:
        return [_end(process, timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process; its process id. The fork costs nothing, an interpreter with torch would."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def status(child: int) -> int:
    """The exit status of a process of `in_child` once it has ended, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _end(process: subprocess.Popen[str], timeout: float) -> tuple[int, str]:
    output, _ = process.communicate(timeout=timeout)
    return process.returncode, output
