"""Single tensors of a target's checkpoint, read in pieces: the model itself is never loaded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import weight_files

EMBEDDING = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "tok_embeddings.weight")
HEAD = ("lm_head.weight", "embed_out.weight")
_ROWS = 8192


def equals_stored(config: TargetConfig, names: Sequence[str], tensor: Tensor) -> bool | None:
    """Whether the target stores `tensor` [rows, columns], rounding to its dtype aside.

    Args:
        names: endings of names; the first of the target's tensors that has one of them is meant.

    Returns:
        None where that cannot be told: the target has no such tensor in safetensors.
    """
    for name in names:
        for path in weight_files(config):
            found = _compare(path, name, tensor) if path.suffix == ".safetensors" else None
            if found is not None:
                return found
    return None


def _compare(path: Path, ending: str, tensor: Tensor) -> bool | None:
    with safe_open(path, framework="pt") as file:
        name = next((key for key in file.keys() if key == ending or key.endswith("." + ending)), None)  # noqa: SIM118
        if name is None:
            return None
        stored = file.get_slice(name)
        if tuple(stored.get_shape()) != tuple(tensor.shape):
            return False
        return all(
            _close(stored[start : start + _ROWS], tensor[start : start + _ROWS])
            for start in range(0, tensor.shape[0], _ROWS)
        )


def _close(theirs: Tensor, ours: Tensor) -> bool:
    coarser = max(torch.finfo(theirs.dtype).eps, torch.finfo(ours.dtype).eps)
    return torch.allclose(theirs.float(), ours.float(), rtol=coarser, atol=1e-7)
