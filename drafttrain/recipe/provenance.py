"""Where a run came from: versions, revision, hashes, command line, time, hardware."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from drafttrain.files import read_json, write_json

PROVENANCE = "provenance.json"
"""Name of the file in a run's folder: a list with one entry for each launch."""

_PACKAGES = (
    "drafttrain",
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "safetensors",
    "numpy",
    "datasets",
    "deepspeed",
    "peft",
    "triton",
    "wandb",
)
_CHECKOUT = Path(__file__).resolve().parents[2]


def collect_provenance(
    target: Mapping[str, Any] | None = None,
    data: Mapping[str, str] | None = None,
    command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What this launch ran with.

    Args:
        target: `TargetIdentity.to_dict()`: name, and hashes of weights, tokenizer and template.
        data: name of each input -> its SHA-256.
        command: the command line, this process's own unless given.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(sys.argv if command is None else command),
        "versions": versions(),
        "git": git_revision(),
        "hardware": hardware(),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "target": None if target is None else dict(target),
        "data": dict(data or {}),
    }


def record_provenance(folder: str | Path, entry: Mapping[str, Any]) -> Path:
    """Add a launch to the run's list; earlier launches (before a resume) are kept."""
    file = Path(folder) / PROVENANCE
    launches = read_json(file) if file.exists() else []
    write_json(file, [*launches, dict(entry)])
    return file


def copy_provenance(source: str | Path, out: str | Path) -> None:
    """Give what was made of a folder that folder's launches, as far as it has any, and this one."""
    file = Path(out) / PROVENANCE
    before = Path(source) / PROVENANCE
    launches = read_json(before) if before.exists() else []
    write_json(file, [*launches, {**collect_provenance(), "made_from": str(Path(source).resolve())}])


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on, those installed only."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "drafttrain" not in found:  # a bare checkout, run without being installed
        from drafttrain import __version__

        found["drafttrain"] = __version__
    return found


def git_revision(folder: Path = _CHECKOUT) -> dict[str, Any] | None:
    """`{"commit", "dirty"}` of the checkout this code runs from; None for an installed package."""
    if not (folder / ".git").exists():
        return None
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "dirty": bool(status)}


def hardware() -> dict[str, Any]:
    """Processor, cores this process may use, and GPUs."""
    import torch

    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def cpu_text(found: dict[str, Any]) -> str:
    """The processor of a `hardware()`, and how many of its cores a process had."""
    return f"{found['cpu']} ({found['cores']} core{'' if found['cores'] == 1 else 's'})"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
