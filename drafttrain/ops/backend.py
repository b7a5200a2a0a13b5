"""Which implementation of an op runs: its torch reference, or its Triton kernel.

A kernel runs on CUDA tensors, and on CPU tensors where Triton interprets (`TRITON_INTERPRET=1`, set before the kernels
are imported): slowly, to check it without a GPU.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

from drafttrain.errors import EngineError

Impl = Literal["auto", "reference", "triton"]


@cache
def have_triton() -> bool:
    """Whether Triton is installed."""
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU in this process."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")


def use_triton(op: str, impl: str, device: torch.device, dtype: torch.dtype | None = None) -> bool:
    """Whether `op` runs as a kernel. An explicit choice never falls back.

    Args:
        op: name of the op, for messages.
        impl: "auto" takes the kernel on CUDA where Triton is installed; "reference" and "triton" are explicit.
        device: of the op's tensors.
        dtype: of its floating-point inputs; None = whatever the op makes of them.

    Raises:
        EngineError: no such `impl`, or a kernel that cannot run here.
    """
    if impl not in get_args(Impl):
        raise EngineError(f"{op} has no impl {impl!r}", remedy=f"one of {', '.join(get_args(Impl))}")
    fits = dtype in (None, torch.float32, torch.float16, torch.bfloat16)
    if impl == "auto":
        return device.type == "cuda" and have_triton() and fits
    if impl == "reference":
        return False
    if not have_triton():
        raise EngineError(f"{op}: impl 'triton' needs Triton", remedy="pip install 'drafttrain[kernels]'")
    if not fits:
        raise EngineError(f"{op}: the kernel takes float32, float16 and bfloat16, not {dtype}", remedy="impl=reference")
    if device.type != "cuda" and not interpreted():
        raise EngineError(
            f"{op}: impl 'triton' cannot run on {device.type}", remedy="use CUDA tensors, impl=reference or impl=auto"
        )
    return True


def where_it_is(tensor: Tensor) -> AbstractContextManager[None]:
    """While active, the GPU that a tensor is on is the current one: Triton launches there, wherever arguments are."""
    on: AbstractContextManager[None] = torch.cuda.device_of(tensor)
    return on


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()
