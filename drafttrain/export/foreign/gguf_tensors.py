"""Fields and tensors of a GGUF file as they lie there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader
from torch import Tensor

from drafttrain.errors import CheckpointError

_DTYPES = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def read_gguf_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(metadata, tensors under their GGUF names).

    Raises:
        CheckpointError: damaged, or quantised.
    """
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, OSError, IndexError) as error:
        raise CheckpointError(f"damaged or truncated: {error}", where=path, remedy="copy it again") from None
    tensors = {}
    for entry in reader.tensors:
        dtype = _DTYPES.get(entry.tensor_type)
        if dtype is None:
            raise CheckpointError(
                f"{entry.name} is quantised ({entry.tensor_type.name}): the draft that was trained cannot be had back",
                where=path,
                remedy="give the file before it was quantised (F32, F16 or BF16)",
            )
        data = torch.from_numpy(np.array(entry.data)).view(torch.uint8).view(dtype)
        tensors[entry.name] = data.reshape([int(size) for size in reversed(entry.shape)])
    return fields, tensors
