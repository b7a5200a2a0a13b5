"""The dtype that `auto` stands for: bfloat16 where the machine computes in it, else float32.

A CPU without instructions for bfloat16 takes several times as long for it as for float32.
"""

from __future__ import annotations

from typing import Literal

import torch

from drafttrain.targets.config import AUTO, TargetConfig

Native = Literal["bfloat16", "float32"]

_CPU_HAS = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")


def native_dtype(device: str = AUTO) -> Native:
    """What a device computes in by itself: `cpu`, `cuda`, `cuda:1`, or "auto" for the GPU if there is one."""
    kind = device.partition(":")[0]
    if kind == AUTO:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and torch.cuda.is_available():
        has = torch.cuda.is_bf16_supported(including_emulation=False)
    elif kind == "cpu":
        known = torch.cpu.get_capabilities()
        has = any(known.get(name) for name in _CPU_HAS)
    else:
        has = True
    return "bfloat16" if has else "float32"


def settled(config: TargetConfig) -> TargetConfig:
    """With a dtype that is no longer `auto`."""
    if config.dtype != AUTO:
        return config
    return config.model_copy(update={"dtype": native_dtype(config.device)})
