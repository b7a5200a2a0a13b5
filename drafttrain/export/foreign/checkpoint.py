"""A folder made elsewhere as it lies on disk: its config and its tensors. Nothing is unpickled but tensors."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from drafttrain.errors import CheckpointError
from drafttrain.export.foreign.gguf_tensors import read_gguf_file
from drafttrain.files import read_object

CONFIG = "config.json"
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Of what is the same thing in two forms, the first is read.
_NAMES = (("model.safetensors", "pytorch_model.bin"), ("medusa_lm_head.safetensors", "medusa_lm_head.pt"))
_OBJECTS = ("eagle_config", "rope_parameters", "rope_scaling", "speculators_config", "transformer_layer_config")
_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_WRAPPERS = ("state_dict", "model_state_dict", "draft_state_dict", "model", "module")


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds.

    Attributes:
        folder: where it lies.
        config: `config.json`, {} without one; of a GGUF file its fields.
        tensors: under their stored names, on the CPU, mapped from the file where that is possible.
        files: names of the weight files that were read.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    files: tuple[str, ...]


def read_checkpoint(folder: str | Path) -> Checkpoint:
    """Read a folder's config and weights: safetensors, else pickled tensors with `weights_only=True`.

    Raises:
        CheckpointError: no folder, no weights, several files that could be meant, damaged files, or a pickle of
            more than tensors.
    """
    place = Path(folder)
    if not place.is_dir():
        raise CheckpointError("no such folder", where=folder, remedy="give a folder with config.json and weights")
    config = read_object(place / CONFIG) if (place / CONFIG).is_file() else {}
    wrong = next((key for key in _OBJECTS if not isinstance(config.get(key) or {}, dict)), None)
    if wrong is not None:
        raise CheckpointError(f"{wrong} is {config[wrong]!r}, which is no object", where=place / CONFIG)
    files = _weight_files(place)
    tensors: dict[str, Tensor] = {}
    for file in files:
        if file.suffix == ".gguf":
            config, tensors = read_gguf_file(file)
        else:
            tensors |= read_tensors(file)
    return Checkpoint(place, config, tensors, tuple(file.name for file in files))


def _weight_files(folder: Path) -> list[Path]:
    for index in _INDEXES:
        if (folder / index).is_file():
            named = read_object(folder / index).get("weight_map")
            if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
                raise CheckpointError("has no weight_map", where=folder / index, remedy="copy it again")
            names = sorted(set(named.values()))
            missing = [name for name in names if not (folder / name).is_file()]
            if missing:
                raise CheckpointError(
                    f"lacks {', '.join(missing)}, which {index} names", where=folder, remedy="copy it again"
                )
            return [folder / name for name in names]
    named = [next((folder / name for name in group if (folder / name).is_file()), None) for group in _NAMES]
    found = [file for file in named if file is not None]
    for pattern in _PATTERNS:
        found = found or sorted(folder.glob(pattern))
    if len(found) > 1:
        raise CheckpointError(
            f"several weight files could be meant: {', '.join(file.name for file in found)}",
            where=folder,
            remedy="leave one of them in the folder",
        )
    if not found:
        raise CheckpointError("no weight files", where=folder, remedy=f"looked for {', '.join(_PATTERNS)}")
    return found


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one file."""
    if file.suffix == ".safetensors":
        try:
            return load_file(file)
        except SafetensorError as error:
            raise CheckpointError(f"damaged or truncated: {error}", where=file, remedy="copy it again") from None
    return _tensors_of(_unpickled(file), file)


def _unpickled(file: Path) -> Any:
    try:
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before torch 1.6 cannot be mapped
            return torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, AttributeError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"holds more than tensors, which drafttrain does not unpickle: {first}",
            where=file,
            remedy="where you trust its origin, load it there and save its state dict as model.safetensors",
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"damaged or truncated: {error}", where=file, remedy="copy it again") from None


def _tensors_of(value: Any, file: Path) -> dict[str, Tensor]:
    while isinstance(value, Mapping) and not any(isinstance(item, Tensor) for item in value.values()):
        inner = next((value[key] for key in _WRAPPERS if isinstance(value.get(key), Mapping)), None)
        if inner is None:
            break
        value = inner
    tensors = (
        {str(name): item for name, item in value.items() if isinstance(item, Tensor)}
        if isinstance(value, Mapping)
        else {}
    )
    if not tensors:
        raise CheckpointError(
            "holds no tensors by name", where=file, remedy="give the file with the draft's state dict"
        )
    return tensors
