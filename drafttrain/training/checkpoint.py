"""Checkpoints: folders that are whole or absent, found again by step, read without unpickling.

    checkpoints/step-00000120/model.safetensors       the draft's state dict, fp32 master weights
    checkpoints/step-00000120/optimizer.safetensors   Adam's moments by parameter name
    checkpoints/step-00000120/checkpoint.json         training state, fingerprint, size and SHA-256 of both files

The frozen target is not part of a draft's state dict, so it is never written. The noise of a step is seeded by
(seed, step, rank), so the data position is all the state that random numbers have.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from drafttrain.errors import CheckpointError, UserError
from drafttrain.files import atomic_folder, read_json, require_free_space, sha256_file, write_json

SCHEMA = 1
_NAME = re.compile(r"step-(\d{8})")


@dataclass
class TrainState:
    """Where training stands.

    Attributes:
        step: optimiser steps done.
        epoch, row: data position: rows done of the current epoch.
        tokens: tokens trained on, padding left out.
        best_tau: best acceptance length measured so far, and the step of it.
        interval: sums since the last line of the metrics log.
    """

    step: int = 0
    epoch: int = 0
    row: int = 0
    tokens: int = 0
    best_tau: float | None = None
    best_step: int | None = None
    interval: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(
    folder: Path,
    state: TrainState,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    fingerprint: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write a checkpoint and drop the oldest beyond `keep`.

    Args:
        folder: `checkpoints/` of the run.
        state: training state.
        model: the draft; its state dict is written.
        optimizer: AdamW over the draft's parameters.
        fingerprint: JSON values that a run resuming from here must share.
        keep: newest checkpoints to leave.
    """
    final = folder / f"step-{state.step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    for left_over in folder.glob(".step-*.part"):
        shutil.rmtree(left_over, ignore_errors=True)
    weights = _contiguous(model.state_dict())
    moments = _contiguous(optimizer_tensors(model, optimizer))
    require_free_space(folder, sum(t.nbytes for part in (weights, moments) for t in part.values()) + (16 << 20))
    if final.exists():
        # Only a damaged folder of the same step can stand here: resuming found it unusable.
        shutil.rmtree(final)
    meta = {"schema": SCHEMA, "state": asdict(state), "fingerprint": dict(fingerprint)}
    try:
        with atomic_folder(final) as partial:
            _write(partial, {"model.safetensors": weights, "optimizer.safetensors": moments}, meta)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot be written: {error}",
            where=final,
            remedy="the checkpoints before are whole: free some space and run the same command again",
        ) from error
    for old in sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))[:-keep]:
        shutil.rmtree(old)
    return final


def _write(folder: Path, parts: Mapping[str, dict[str, Tensor]], meta: dict[str, Any]) -> None:
    files = {}
    for name, tensors in parts.items():
        save_file(tensors, folder / name)
        _sync(folder / name)
        files[name] = {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)}
    write_json(folder / "checkpoint.json", {**meta, "files": files})


def load_checkpoint(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, fingerprint: Mapping[str, Any]
) -> TrainState:
    """Put weights and optimiser state back and return the training state.

    Raises:
        CheckpointError: damaged, of another draft, or of a run whose data or seed differ; names what.
    """
    meta = check_whole(path)
    differing = [
        f"{key} (checkpoint: {meta['fingerprint'].get(key)}, here: {value})"
        for key, value in fingerprint.items()
        if meta["fingerprint"].get(key) != value
    ]
    if differing:
        raise CheckpointError(
            f"the checkpoint belongs to another run; what differs: {'; '.join(differing)}",
            where=path,
            remedy="give the run another name, or train with --resume never",
        )
    weights = load_file(path / "model.safetensors")
    _same_tensors(path, "weights", weights, model.state_dict())
    model.load_state_dict(weights)
    _load_optimizer(path, model, optimizer)
    return TrainState(**meta["state"])


def newest_whole(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are skipped with a warning, half-written ones ignored."""
    if not folder.is_dir():
        return None
    for path in sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), reverse=True):
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


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`<parameter name>/<key>` -> tensor, for everything the optimiser keeps."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": value if isinstance(value, Tensor) else torch.tensor(value)
        for parameter, entries in optimizer.state.items()
        for key, value in entries.items()
    }


def _load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    stored = load_file(path / "optimizer.safetensors")
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in stored.items():
        name, _, entry = key.rpartition("/")
        if name not in parameters:
            raise CheckpointError(f"the optimiser state has {name}, the draft does not", where=path)
        # Adam's step counter stays where torch keeps it; moments follow their parameter.
        parameter = parameters[name]
        moved = value if value.dim() == 0 and not _fused_on_gpu(optimizer) else value.to(parameter.device)
        optimizer.state[parameter][entry] = moved


def _fused_on_gpu(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("fused") and group["params"][0].is_cuda for group in optimizer.param_groups)


def _same_tensors(path: Path, what: str, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    shapes = [key for key in wanted.keys() & found.keys() if wanted[key].shape != found[key].shape]
    if missing or unknown or shapes:
        raise CheckpointError(
            f"the checkpoint's {what} are of another draft: missing {missing[:3]}, unknown {unknown[:3]}, "
            f"other shapes {sorted(shapes)[:3]}",
            where=path,
            remedy="give the run another name, or train with --resume never",
        )


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # A copy each: safetensors refuses tensors that share memory.
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def set_aside(folder: Path) -> Path | None:
    """Rename a folder or file out of the way of a fresh start: `name.1`, `name.2`, ... Nothing is deleted."""
    if not folder.exists():
        return None
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return folder.rename(aside)
