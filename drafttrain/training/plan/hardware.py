"""What a recipe is planned for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

import torch

from drafttrain.errors import UserError
from drafttrain.targets.native import native_dtype

# Dense peaks in TFLOP/s, bf16 and fp32 as torch uses it by default (no TF32), GB of memory, and GB/s that a GPU can
# receive from the others of its node: vendors' data sheets.
_GPUS: dict[str, tuple[float, float, float, float]] = {
    "A10": (125, 31.2, 24, 32),
    "A100": (312, 19.5, 80, 300),
    "B200": (2250, 80, 180, 900),
    "H100": (989, 67, 80, 450),
    "H200": (989, 67, 141, 450),
    "L4": (121, 30.3, 24, 32),
    "L40S": (362, 91.6, 48, 32),
    "MI300X": (1307, 163, 192, 448),
    "RTX4090": (165, 82.6, 24, 32),
}
_BETWEEN_NODES = 50.0  # GB/s: one 400 Gbit/s adapter a GPU
_LINK_USE = 0.7
_SPEC = re.compile(r"(?:(\d+)x)?([A-Za-z0-9]+?)(?:-(\d+(?:\.\d+)?)GB?)?", re.IGNORECASE)
_CORE_FLOPS = 50e9
_EMULATED = 0.2
"""Of that, in bfloat16 on a CPU without instructions for it."""


@dataclass(frozen=True)
class Hardware:
    """Devices of one kind, one rank each.

    Attributes:
        name: for people.
        ranks: over all nodes.
        nodes: machines.
        memory: bytes of one rank's device.
        bf16, fp32: peak FLOP/s of one rank.
        target_use, draft_use: assumed share of the peak while the target and while the draft computes.
        link: bytes/s that a rank receives from the others, assumed.
        reserved: bytes that the driver, libraries and fragmentation take.
        is_cpu: whether the device is the CPU.
    """

    name: str
    ranks: int
    nodes: int
    memory: int
    bf16: float
    fp32: float
    target_use: float
    draft_use: float
    link: float
    reserved: int
    is_cpu: bool

    def peak(self, dtype: str) -> float:
        """FLOP/s in a dtype by name."""
        return self.fp32 if dtype in ("float32", "fp32") else self.bf16


def parse_gpus(spec: str, nodes: int = 1) -> Hardware:
    """`8xH100-80G`: GPUs of a node, their kind, and their memory where it differs from the usual.

    Raises:
        UserError: an unknown kind, or no such form.
    """
    match = _SPEC.fullmatch(spec.strip())
    kind = "" if match is None else match[2].upper()
    if match is None or kind not in _GPUS or match[1] == "0":
        raise UserError(
            f"no such hardware: {spec!r}", where="--gpus", remedy=f"write 8xH100-80G; known are {', '.join(_GPUS)}"
        )
    bf16, fp32, memory, inside = _GPUS[kind]
    gigabytes = float(match[3]) if match[3] else memory
    count = int(match[1] or 1)
    where = f" on each of {nodes} nodes" if nodes > 1 else ""
    # A vendor's GB of device memory: 80 GB is a little less than 80 GiB; reserve for that, the context and the pool.
    return Hardware(
        f"{count} x {kind} {gigabytes:g} GB{where}",
        count * nodes,
        nodes,
        int(gigabytes * 2**30),
        bf16 * 1e12,
        fp32 * 1e12,
        target_use=0.40,
        draft_use=0.25,
        link=_LINK_USE * (inside if nodes == 1 else min(inside, _BETWEEN_NODES)) * 1e9,
        reserved=int(2 * 2**30 + 0.05 * gigabytes * 2**30),
        is_cpu=False,
    )


def this_machine() -> Hardware:
    """The GPUs here if their kind is known, else one process on the CPU."""
    if torch.cuda.is_available():
        kind = kind_of(torch.cuda.get_device_name(0))
        if kind is not None:
            gigabytes = torch.cuda.get_device_properties(0).total_memory / 2**30
            return parse_gpus(f"{torch.cuda.device_count()}x{kind}-{gigabytes:.0f}G")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fp32 = cores * _CORE_FLOPS
    bf16 = fp32 if native_dtype("cpu") == "bfloat16" else fp32 * _EMULATED
    return Hardware(f"this CPU, {cores} cores", 1, 1, memory, bf16, fp32, 1.0, 0.8, 5e9, 2**30, True)


def kind_of(name: str) -> str | None:
    """The known kind of a GPU by the driver's name for it; None of others."""
    joined = name.upper().replace("RTX ", "RTX")
    # An L40 is no L4, an A1000 no A100.
    return max((kind for kind in _GPUS if re.search(rf"{kind}(?!\d)", joined)), key=len, default=None)
