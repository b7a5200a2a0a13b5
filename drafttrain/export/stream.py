"""Safetensors written and compared piece by piece: no second copy of a draft in memory.

The library's own writer makes the whole file in memory first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
_PIECE = 1 << 22  # elements
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
            for piece in tensors[name].detach().reshape(-1).split(_PIECE):
                file.write(piece.contiguous().view(torch.uint8).numpy())


def same_tensor(file: Any, name: str, wanted: Tensor) -> bool:
    """Whether a file opened by `safe_open` holds exactly this tensor, compared by rows."""
    stored = file.get_slice(name)
    if stored.get_dtype() != _CODES[wanted.dtype] or tuple(stored.get_shape()) != tuple(wanted.shape):
        return False
    if wanted.dim() == 0:
        return torch.equal(file.get_tensor(name), wanted)
    rows = max(1, _PIECE // max(1, wanted[0].numel() if wanted.shape[0] else 1))
    return all(
        torch.equal(stored[start : start + rows], wanted[start : start + rows])
        for start in range(0, wanted.shape[0], rows)
    )
