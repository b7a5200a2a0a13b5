"""Single tensors of a target's checkpoint, read in pieces: the model itself is never loaded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from drafttrain.errors import TargetError
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import load_text_config, weight_files

EMBEDDING = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "tok_embeddings.weight")
HEAD = ("lm_head.weight", "embed_out.weight")
_ROWS = 8192
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def head_names(config: TargetConfig) -> tuple[str, ...]:
    """Endings of the name under which a target stores its output head: a tied one is the embedding."""
    return EMBEDDING if load_text_config(config).tie_word_embeddings else HEAD


def read_head(config: TargetConfig, dtype: torch.dtype) -> Tensor:
    """A target's output head [V, H] in `dtype`, on the CPU. No other tensor is read, and it is not in memory twice.

    Raises:
        TargetError: no head in safetensors, one that is quantised, or one with a bias, which this tensor alone is not.
    """
    names = head_names(config)
    remedy = "give it as an unquantised checkpoint in safetensors"
    for name in names:
        for path in weight_files(config):
            if path.suffix != ".safetensors":
                continue
            with safe_open(path, framework="pt") as file:
                found = _ending(file.keys(), name)
                if found is None:
                    continue
                if _ending(file.keys(), name.replace("weight", "bias")) is not None:
                    raise TargetError("its output head has a bias", where=config.model)
                stored = file.get_slice(found)
                rows, width = stored.get_shape()
                if stored[:1].dtype not in _PLAIN:
                    raise TargetError(f"its output head {found} is quantised", where=config.model, remedy=remedy)
                head = torch.empty(rows, width, dtype=dtype)
                for start in range(0, rows, _ROWS):
                    head[start : start + _ROWS] = stored[start : start + _ROWS]
                return head
    raise TargetError(f"no output head ({', '.join(names)}) in safetensors", where=config.model, remedy=remedy)


def _ending(keys: Iterable[str], ending: str) -> str | None:
    return next((key for key in keys if key == ending or key.endswith("." + ending)), None)


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
        name = _ending(file.keys(), ending)
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
