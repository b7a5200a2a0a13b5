"""Compile kernels ahead of time for GPUs that are not here, and read the assembler's report.

    python -m tests.kernels.aot tree_attention 80,90,100

prints a JSON list: a case, an architecture, registers and bytes spilled each. In a process that does not interpret.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ONE_WARP = {"num_warps": 1}


class Case(NamedTuple):
    """A kernel with the types of its arguments: `*bf16`, `i32`, ... by name; what is no argument is a constant."""

    name: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]


def tree_attention() -> Iterator[Case]:
    """Head widths 64 and 128, trees of 8, 16 and 64 nodes and their root; wider heads, as in latent attention."""
    from drafttrain.ops.tree_attention.triton import config

    strides = [f"{x}_{part}" for x in "qkvo" for part in ("row", "head", "token")]
    for width, of_value, group in ((64, 64, 4), (128, 128, 4), (192, 128, 1), (256, 256, 2)):
        for nodes in (0, 8, 16, 64) if width <= 128 else (64,):
            for splits, fields, softcap in ((1, 4, True), (8, 3, False)):
                sizes = config(group * (nodes + 1), width, of_value)
                options = {key: sizes.pop(key) for key in ("num_warps", "num_stages")}
                types = {"Q": "*bf16", "K": "*bf16", "V": "*bf16", "PACKED": "*i64", "OUT": "*bf16"}
                types |= {"PART": "*fp32", "LSE": "*fp32", "scale": "fp32", "softcap": "fp32", "T": "i32", "S": "i32"}
                types |= dict.fromkeys(strides, "i32")
                constants = {"HKV": 8, "G": group, "D": width, "DV": of_value, "FIELDS": fields, "SPLITS": splits}
                constants |= {"WORD": 32, "SOFTCAP": softcap, "UPCAST": False, "PRECISION": "tf32", **sizes}
                yield Case(f"D{width} nodes{nodes} splits{splits}", "_attend", types, constants, options)
    # An fp32 target of a tiny model, as tests on a GPU have it.
    sizes = config(3 * 9, 8, 8)
    options = {key: sizes.pop(key) for key in ("num_warps", "num_stages")}
    types = {
        "Q": "*fp32",
        "K": "*fp32",
        "V": "*fp32",
        "PACKED": "*i64",
        "OUT": "*fp32",
        "PART": "*fp32",
        "LSE": "*fp32",
    }
    types |= {"scale": "fp32", "softcap": "fp32", "T": "i32", "S": "i32"} | dict.fromkeys(strides, "i32")
    constants = {"HKV": 2, "G": 3, "D": 8, "DV": 8, "FIELDS": 4, "SPLITS": 2, "WORD": 32}
    constants |= {"SOFTCAP": True, "UPCAST": True}
    yield Case("fp32 D8", "_attend", types, constants | {"PRECISION": "ieee", **sizes}, options)
    types = {"PART": "*fp32", "LSE": "*fp32", "OUT": "*bf16", "T": "i32", "o_row": "i32", "o_head": "i32"}
    constants = {"HQ": 32, "DV": 128, "SPLITS": 32, "BLOCK_V": 128}
    yield Case("merge", "_merge", types | {"o_token": "i32"}, constants, {})


def tree_walk() -> Iterator[Case]:
    """Trees of 60 nodes; sampled ones over a vocabulary of 128 k, one child a place and three."""
    from drafttrain.ops.tree_walk.triton import BLOCK

    types = dict.fromkeys(["CHOSEN", "TOKENS", "COUNTS", "PARENTS", "ACCEPTED", "BONUS", "PATH"], "*i64")
    yield Case("match", "_match", types | dict.fromkeys(["N", "parents_row", "reach"], "i32"), {"BLOCK": 64}, ONE_WARP)
    types = dict.fromkeys(
        ["TOKENS", "COUNTS", "CHILDREN", "Q_ROWS", "TO_DRAFT", "ACCEPTED", "BONUS", "PATH"], "*i64"
    ) | dict.fromkeys(["N", "R", "V", "VD", "depths"], "i32")
    types |= {"P": "*fp32", "Q": "*fp32", "WORK": "*fp32", "DECIDES": "*fp64", "DRAWS": "*fp64"}
    for children in (1, 3):
        yield Case(f"reject {children}", "_reject", types, {"M": children, "BLOCK": BLOCK}, {"num_warps": 8})


def kv_compact() -> Iterator[Case]:
    """Paths of 6 and 64 tokens."""
    types = {"STORE": "*bf16", "LENGTHS": "*i64", "SOURCE": "*i64"}
    types |= dict.fromkeys(["first_row", "rows", "S", "moves"], "i32")
    for moves, width in ((8, 128), (64, 64)):
        sizes = {"HEADS": 8, "D": 128, "BLOCK_M": moves, "BLOCK_D": width}
        yield Case(f"path {moves}", "_compact", types, sizes, {})


def draft_topk() -> Iterator[Case]:
    """The ten best of 32 k and 128 k, and of 100 candidates."""
    types = {"LOGITS": "*bf16", "VALUES": "*fp32", "IDS": "*i64", "MAX": "*fp32", "SUM": "*fp32"}
    ints = dict.fromkeys(["V", "chunks", "row_stride"], "i32")
    yield Case("chunk", "_best_of_chunk", types | ints, {"COUNT": 10, "CHUNK": 2048}, {})
    types = {"VALUES": "*fp32", "IDS": "*i64", "MAX": "*fp32", "SUM": "*fp32", "SCORE": "*fp32", "OUT": "*fp32"}
    types |= {"OUT_IDS": "*i64", "chunks": "i32"}
    for chunks in (16, 64):
        sizes = {"COUNT": 10, "SCORED": True, "BLOCK": 16 * chunks, "CHUNKS": chunks}
        yield Case(f"{chunks} chunks", "_best_of_chunks", types, sizes, {})
    types = {"SCORE": "*fp32", "OUT": "*i64", "candidates": "i32"}
    yield Case("select", "_select", types, {"COUNT": 10, "BLOCK": 128}, {})


def soft_ce() -> Iterator[Case]:
    """With and without a gradient."""
    from drafttrain.ops.soft_ce.triton import BLOCK

    types = {"DRAFT": "*bf16", "TARGET": "*bf16", "VALUE": "*fp32", "TOP": "*i64", "weight": "fp32"}
    types |= dict.fromkeys(["V", "draft_row", "target_row"], "i32")
    for gradient in (True, False):
        sizes = {"DIVERGENCE": gradient, "GRADIENT": gradient, "BLOCK": BLOCK}
        yield Case(f"gradient {gradient}", "_soft_ce", types, sizes, {"num_warps": 8})


CASES = {
    "soft_ce": soft_ce,
    "tree_attention": tree_attention,
    "tree_walk": tree_walk,
    "kv_compact": kv_compact,
    "draft_topk": draft_topk,
}


def compile_case(module: Any, case: Case, arch: int) -> dict[str, Any]:
    """Compile for one architecture and run the assembler on the result, verbosely."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(module, case.kernel)
    signature = {name: case.types.get(name, "constexpr") for name in kernel.arg_names}
    # Pointers and strides are multiples of 16 where the tensors of an engine are aligned, as they are.
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if case.types.get(name, "").startswith("*") or name.endswith(("_row", "_head", "_token"))
    }
    source = ASTSource(kernel, signature, case.constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=case.options)
    return {"case": case.name, "arch": arch, **_report(compiled.asm["ptx"], arch)}


def _report(ptx: str, arch: int) -> dict[str, int]:
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        target = re.search(r"^\.target (\w+)", ptx, re.M)
        assert target is not None
        ptxas = (knobs.nvidia.ptxas_blackwell if arch >= 100 else knobs.nvidia.ptxas).path
        done = subprocess.run(
            [ptxas, "-v", f"--gpu-name={target[1]}", str(source), "-o", os.devnull],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
    spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", done.stderr)]
    registers = re.search(r"Used (\d+) registers", done.stderr)
    assert spilled and registers is not None, done.stderr
    return {"spilled": sum(spilled), "registers": int(registers[1])}


def main() -> None:
    """Entry point."""
    op, archs = sys.argv[1], [int(arch) for arch in sys.argv[2].split(",")]
    module = import_module(f"drafttrain.ops.{op}.triton")
    print(json.dumps([compile_case(module, case, arch) for case in CASES[op]() for arch in archs]))


if __name__ == "__main__":
    main()
