"""`torch.compile` on models: on what lies between attention and packed products, which have kernels of their own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from drafttrain.errors import EngineError
from drafttrain.ops.backend import have_triton
from drafttrain.ops.packed_linear import is_packed

# Of one function: rows, new tokens and widths that are 1 or more, for each kind of norm.
_RECOMPILES = 64
P = ParamSpec("P")
R = TypeVar("R")


def compile_parts(blocks: Sequence[nn.Module], norm: nn.Module) -> list[nn.Module]:
    """Compile the MLPs and norms of blocks, and the last norm, in their places; shapes stay free.

    Attention is left to the cache's own kernels. On a CPU, products with packed weights stay calls as well, and norms
    are what is left: a handful of passes over a row become one.

    Returns:
        what was compiled.

    Raises:
        EngineError: no compiler for the device.
    """
    require_compiler(next(norm.parameters()).device)
    _configure()
    found = [*(part for block in blocks for part in _parts(block)), norm]
    for part in found:
        part.forward = torch.compile(part.forward, dynamic=True)
    return found


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """The function, fused. Sizes that changed once stay free from then on; those that never change are known to the
    compiler."""
    _configure()
    found: Callable[P, R] = torch.compile(function)
    return found


def _configure() -> None:
    from torch._dynamo import config  # seconds, which only those who compile wait for

    config.recompile_limit = max(config.recompile_limit, _RECOMPILES)
    # DDP sends gradients as they come; parts this small have nothing to be split for that.
    config.optimize_ddp = False


def require_compiler(device: torch.device) -> None:
    """Refuse before anything runs what torch would fail on at the first token.

    Raises:
        EngineError: no C++ compiler on a CPU, no Triton on CUDA.
    """
    if device.type == "cuda":
        if not have_triton():
            raise EngineError("compile needs Triton", remedy="pip install 'drafttrain[kernels]', or leave it off")
    elif not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
        raise EngineError("compile needs a C++ compiler", remedy="install g++, set CXX, or leave it off")


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The largest parts that hold neither attention nor a packed weight."""
    for child in module.children():
        if isinstance(child, nn.Linear | nn.Embedding):
            continue
        # Attention modules are those that know their place in the cache.
        if hasattr(child, "layer_idx") or any(is_packed(inner) for inner in child.modules()):
            yield from _parts(child)
        elif next(child.parameters(), None) is not None:
            yield child
