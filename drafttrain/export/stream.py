"""Safetensors written and compared piece by piece: no second copy of a draft in memory.

The library's own writer makes the whole file in memory first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

# As the library orders them: wide types first, so that every tensor is aligned.
_CODES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
_PIECE = 1 << 20  # elements
_ALIGNMENT = 8


def write_safetensors(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors on the CPU as one safetensors file.

    Raises:
        OSError: of the disk.
        KeyError: a dtype that the format does not have.
    """
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), _CODES[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in order:
            for piece in pieces(tensors[name]):
                file.write(piece)


def differing(path: str | Path, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Names of those tensors that a file holds otherwise, or not at all, compared byte by byte.

    Read, not mapped: the pages of a mapped file would count as this process's memory.
    """
    with Path(path).open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name, wanted in tensors.items():
            entry = header.get(name)
            described = entry is not None and (entry["dtype"], entry["shape"]) == (
                _CODES[wanted.dtype],
                list(wanted.shape),
            )
            if described:
                file.seek(8 + size + entry["data_offsets"][0])
            if not described or not all(holds(file, piece) for piece in pieces(wanted)):
                yield name


def holds(file: BinaryIO, piece: Any) -> bool:
    """Whether the next bytes of a file are these."""
    return bool(np.array_equal(np.frombuffer(file.read(piece.size), np.uint8), piece))


def pieces(tensor: Tensor) -> Iterator[Any]:
    """A tensor's bytes, as arrays of uint8."""
    for piece in tensor.detach().reshape(-1).split(_PIECE):
        yield piece.contiguous().view(torch.uint8).numpy()
