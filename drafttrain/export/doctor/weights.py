"""Weight files as they lie there: names, shapes and dtypes without reading the weights, single tensors on demand."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.files import read_json

INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "BOOL": torch.bool,
}
"""Of safetensors headers. Others (8-bit floats, packed integers) are kept by name."""
FLOATS = ("F64", "F32", "F16", "BF16")
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's header. `dtype` is its name in safetensors, such as BF16."""

    shape: tuple[int, ...]
    dtype: str
    file: Path | None = None

    @property
    def is_float(self) -> bool:
        """Of a plain floating-point type."""
        return self.dtype in FLOATS

    @staticmethod
    def of(tensor: Tensor) -> TensorInfo:
        """The header that this tensor would have."""
        return TensorInfo(tuple(tensor.shape), _NAMES.get(tensor.dtype, str(tensor.dtype)))


@dataclass(frozen=True)
class WeightFiles:
    """What a folder holds.

    Attributes:
        tensors: stored name -> header.
        files: the weight files that were read.
        pickled: whether they are .bin files.
        problems: what is missing or cut off.
    """

    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...]
    pickled: bool = False
    problems: tuple[str, ...] = field(default_factory=tuple)


def read_headers(folder: Path) -> WeightFiles:
    """The headers of all weight files of a folder: safetensors, or else pickled ones, which are read with
    `weights_only=True` alone."""
    problems: list[str] = []
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        try:
            named = sorted(set(read_json(folder / INDEX)["weight_map"].values()))
        except (UserError, KeyError, AttributeError, TypeError) as raised:
            problems.append(f"{INDEX} cannot be read: {raised}")
        else:
            problems += [f"{name}, which {INDEX} names, is missing" for name in named if not (folder / name).is_file()]
            files = [folder / name for name in named if (folder / name).is_file()]
    pickled = False
    if not files and not problems:
        files = sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
        pickled = bool(files)
        if not files:
            problems.append("there are no weights: no .safetensors, .bin or .pt file")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        try:
            tensors |= _pickled(file) if pickled else _header(file)
        except ValueError as raised:
            problems.append(f"{file.name}: {raised}")
    return WeightFiles(tensors, tuple(files), pickled, tuple(problems))


def _header(file: Path) -> dict[str, TensorInfo]:
    """Parsed by hand: the library says of a file that is cut off only that it is invalid."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        start = handle.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= size - 8:
            raise ValueError(f"{size} bytes are no safetensors file, or the beginning of one")
        try:
            header = json.loads(handle.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
            found = {
                name: TensorInfo(tuple(entry["shape"]), str(entry["dtype"]), file) for name, entry in entries.items()
            }
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as raised:
            raise ValueError(f"its header cannot be read: {raised}") from None
    if 8 + length + end != size:
        raise ValueError(f"is {size} bytes long, its header promises {8 + length + end}")
    return found


def _pickled(file: Path) -> dict[str, TensorInfo]:
    state = _load_pickled(file)
    return {
        name: TensorInfo(tuple(tensor.shape), TensorInfo.of(tensor).dtype, file)
        for name, tensor in state.items()
        if isinstance(tensor, Tensor)
    }


def _load_pickled(file: Path) -> Mapping[str, Tensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as raised:
        raise ValueError(f"cannot be read: {str(raised).splitlines()[0]}") from None
    if not isinstance(state, dict):
        raise ValueError("holds no state dict")
    return state


def read_tensor(info: TensorInfo, name: str) -> Tensor:
    """One tensor, on the CPU.

    Raises:
        UserError: the file cannot be read any more.
    """
    assert info.file is not None
    try:
        if info.file.suffix == ".safetensors":
            with safe_open(info.file, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
        return _load_pickled(info.file)[name]
    except (SafetensorError, OSError, ValueError, KeyError) as raised:
        raise UserError(f"tensor {name} cannot be read: {raised}", where=info.file) from None
