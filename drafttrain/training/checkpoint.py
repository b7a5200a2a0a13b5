"""Checkpoints: folders that are whole or absent, found again by step, read without unpickling.

    checkpoints/step-00000120/model.safetensors       what is trained: fp32 master weights, and buffers
    checkpoints/step-00000120/optimizer.safetensors   Adam's moments by parameter name
    checkpoints/step-00000120/checkpoint.json         training state, fingerprint, size and SHA-256 of both files

Tensors are whole on every backend, so a run goes on with another number of ranks or another ZeRO stage. Frozen
weights, the target's and the draft's, are never written. The noise of a step is seeded by (seed, step, rank), so the
data position is all the state that random numbers have.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.errors import CheckpointError, UserError
from drafttrain.files import atomic_folder, read_json, require_free_space, sha256_file, write_json
from drafttrain.training.strategies.base import Snapshot

SCHEMA = 1
WEIGHTS, MOMENTS = "model.safetensors", "optimizer.safetensors"
_SPARE = 16 << 20
_NAME = re.compile(r"step-(\d{8})")
# Keys of fingerprints that the first checkpoints do not have.
_LATER = ("frozen",)


@dataclass
class TrainState:
    """Where training stands.

    Attributes:
        step: optimiser steps done.
        epoch, row: data position: rows done of the current epoch.
        tokens: tokens trained on, padding left out.
        best_tau: best acceptance length measured so far, and the step of it.
        rows_per_step: rows of one optimiser step over all ranks; None before the first.
        interval: sums since the last line of the metrics log.
        guard: what `LossGuard` remembers.
    """

    step: int = 0
    epoch: int = 0
    row: int = 0
    tokens: int = 0
    best_tau: float | None = None
    best_step: int | None = None
    rows_per_step: int | None = None
    interval: dict[str, Any] = field(default_factory=dict)
    guard: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(
    folder: Path,
    state: TrainState,
    snapshot: Snapshot,
    expected: Mapping[str, torch.Size],
    fingerprint: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint and drop the oldest beyond `keep`.

    Args:
        folder: `checkpoints/` of the run.
        state: training state.
        snapshot: whole weights and moments.
        expected: names and shapes of what is trained: the weights must be exactly these.
        fingerprint: JSON values that a run resuming from here must share.
        keep: newest checkpoints to leave.

    Raises:
        CheckpointError: it cannot be written; the older ones are whole.
        RuntimeError: the weights are not what is trained: shards, or frozen ones among them.
    """
    _assert_keys(snapshot, expected)
    final = folder / f"step-{state.step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".step-*.part"):
        shutil.rmtree(left_over, ignore_errors=True)
    parts = {WEIGHTS: snapshot.weights, MOMENTS: snapshot.moments}
    meta = {"schema": SCHEMA, "state": asdict(state), "fingerprint": dict(fingerprint)}
    try:
        require_free_space(folder, sum(t.nbytes for part in parts.values() for t in part.values()) + _SPARE)
        with atomic_folder(final, replace=True) as partial:
            _write(partial, parts, meta)
            _sync(partial)
        _sync(folder)
    except (OSError, SafetensorError, UserError) as error:
        raise CheckpointError(
            f"cannot be written: {error}",
            where=final,
            remedy="the checkpoints before are whole: free some space and run the same command again",
        ) from error
    for old in _by_age(folder)[:-keep]:
        shutil.rmtree(old)
    return final


def _assert_keys(snapshot: Snapshot, expected: Mapping[str, torch.Size]) -> None:
    found = {name: tensor.shape for name, tensor in snapshot.weights.items()}
    if found != dict(expected):
        wrong = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise RuntimeError(f"a checkpoint must hold exactly what is trained, whole; not so: {wrong[:5]}")


def _write(folder: Path, parts: Mapping[str, dict[str, Tensor]], meta: dict[str, Any]) -> None:
    files = {}
    for name, tensors in parts.items():
        save_file(tensors, folder / name)
        _sync(folder / name)
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
    write_json(folder / "checkpoint.json", {**meta, "files": files})


def load_checkpoint(
    path: Path, expected: Mapping[str, torch.Size], fingerprint: Mapping[str, Any]
) -> tuple[TrainState, Snapshot]:
    """Read a checkpoint.

    Args:
        expected: names and shapes of what is trained.

    Raises:
        CheckpointError: damaged, of another draft, or of a run whose data or seed differ; names what.
    """
    meta = check_whole(path)
    _same_run(path, meta["fingerprint"], fingerprint)
    weights = load_file(path / WEIGHTS)
    _same_tensors(path, "weights", {name: tensor.shape for name, tensor in weights.items()}, expected)
    moments = load_file(path / MOMENTS)
    unknown = sorted({key.rpartition("/")[0] for key in moments} - expected.keys())
    if unknown:
        raise CheckpointError(f"the optimiser state has {unknown[0]}, the draft does not", where=path)
    return TrainState(**meta["state"]), Snapshot(weights, moments)


def has_checkpoints(folder: Path) -> bool:
    """Whether a run has got as far as one, whole or not."""
    return folder.is_dir() and bool(_by_age(folder))


def require_same_run(folder: Path, fingerprint: Mapping[str, Any]) -> None:
    """Refuse early, before answers and features are made, what `load_checkpoint` would refuse behind them.

    Args:
        folder: `checkpoints/` of the run, or one checkpoint.
        fingerprint: as much of it as is known yet.

    Raises:
        CheckpointError: the newest checkpoint that can be read is of another run; names what differs.
    """
    candidates = reversed(_by_age(folder)) if not _NAME.fullmatch(folder.name) and folder.is_dir() else [folder]
    for path in candidates:
        try:
            found = dict(read_json(path / "checkpoint.json")["fingerprint"])
        except (UserError, KeyError, TypeError, ValueError):
            continue
        _same_run(path, found, fingerprint)
        return


def _same_run(path: Path, found: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> None:
    known = {key: value for key, value in fingerprint.items() if key in found or key not in _LATER}
    differing = [line for key, value in known.items() for line in _differences(key, found.get(key), value)]
    if differing:
        raise CheckpointError(
            f"the checkpoint belongs to another run; what differs: {'; '.join(differing)}",
            where=path,
            remedy="give the run another name, or train with --resume never",
        )


def _differences(key: str, found: Any, here: Any) -> Iterator[str]:
    if isinstance(found, dict) and isinstance(here, dict):
        for name in sorted(found.keys() | here.keys()):
            yield from _differences(f"{key}.{name}", found.get(name), here.get(name))
    elif found != here:
        yield f"{key} (checkpoint: {found}, here: {here})"


def newest_whole(folder: Path, warn: Callable[[str], None], last_step: int | None = None) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are skipped with a warning, half-written ones ignored.

    Args:
        last_step: later ones are left out.
    """
    if not folder.is_dir():
        return None
    for path in reversed(_by_age(folder)):
        if last_step is not None and _step_of(path) > last_step:
            continue
        try:
            check_whole(path)
        except CheckpointError as error:
            warn(f"skipping a checkpoint: {error.what}")
            continue
        return path
    return None


def check_whole(path: Path) -> dict[str, Any]:
    """The checkpoint's JSON, once its files have the sizes and checksums written there.

    Raises:
        CheckpointError: something is missing, truncated or damaged.
    """
    try:
        meta: dict[str, Any] = read_json(path / "checkpoint.json")
        files = {name: (entry["bytes"], entry["sha256"]) for name, entry in meta["files"].items()}
        schema = meta["schema"]
        dict(meta["fingerprint"])
        TrainState(**meta["state"])
    except (UserError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"no whole checkpoint: {error}", where=path) from None
    if schema != SCHEMA:
        raise CheckpointError(f"the checkpoint has schema {schema}, this version reads {SCHEMA}", where=path)
    for name, (size, digest) in files.items():
        file = path / name
        if not file.exists() or file.stat().st_size != size or sha256_file(file) != digest:
            raise CheckpointError(f"{path.name}/{name} is missing, truncated or damaged", where=path)
    return meta


def _by_age(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _same_tensors(path: Path, what: str, found: Mapping[str, torch.Size], wanted: Mapping[str, torch.Size]) -> None:
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    shapes = [key for key in wanted.keys() & found.keys() if wanted[key] != found[key]]
    if missing or unknown or shapes:
        raise CheckpointError(
            f"the checkpoint's {what} are of another draft: missing {missing[:3]}, unknown {unknown[:3]}, "
            f"other shapes {sorted(shapes)[:3]}",
            where=path,
            remedy="give the run another name, or train with --resume never",
        )


def _sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder, before anything is built on it."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def set_later_aside(folder: Path, step: int) -> list[Path]:
    """Rename the checkpoints behind `step` out of the way; where they lie now.

    A run that goes on from an earlier one has given them up, or cannot read them: they would be taken for its newest,
    by the next resume and by what is kept.
    """
    later = [path for path in _by_age(folder) if _step_of(path) > step] if folder.is_dir() else []
    return [aside for path in later if (aside := set_aside(path)) is not None]


def set_aside(folder: Path) -> Path | None:
    """Rename a folder or file out of the way of a fresh start: `name.1`, `name.2`, ... Nothing is deleted."""
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(aside)
