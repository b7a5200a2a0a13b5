"""GGUF files: written tensor by tensor, read back and compared; the engine llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from gguf import GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFWriter
from torch import Tensor

from drafttrain.export.gguf_model import gguf_layout
from drafttrain.export.gguf_tokenizer import tokenizer_fields
from drafttrain.export.ir import DraftIR, ExportError
from drafttrain.export.layout import Engine, Layout
from drafttrain.export.stream import holds, pieces
from drafttrain.targets.config import TargetConfig

FILE = "draft.gguf"
_ARCHITECTURE = "general.architecture"
_TYPES = {
    torch.float32: GGMLQuantizationType.F32,
    torch.float16: GGMLQuantizationType.F16,
    torch.bfloat16: GGMLQuantizationType.BF16,
}


def complete(ir: DraftIR, layout: Layout, folder: Path, target: str, k: int) -> Layout:
    """Add the target's tokenizer, which is the draft's.

    Raises:
        TargetError: the target has none.
        ExportError: llama.cpp has none like it.
    """
    from drafttrain.targets.load import load_tokenizer

    assert ir.lm_config is not None
    fields = tokenizer_fields(load_tokenizer(TargetConfig(model=target)), int(ir.lm_config["vocab_size"]))
    return replace(layout, config={**layout.config, **fields})


def write_gguf(folder: Path, ir: DraftIR, layout: Layout, shown: Path) -> None:
    """Write the file into an existing folder and read it back.

    Raises:
        ExportError: what was read differs.
    """
    path = folder / FILE
    writer = _writer(path, layout)
    try:
        for name, tensor in layout.tensors.items():
            writer.add_tensor(name, _array(tensor), raw_dtype=_TYPES[tensor.dtype])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    problems = list(_problems(path, layout))
    if problems:
        raise ExportError(
            f"the export is not what was to be written: {'; '.join(problems)}",
            where=shown,
            remedy="check the disk, and please report it if it happens again",
        )


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory; numpy has no bfloat16, whose bytes are handed over."""
    tensor = tensor.detach().contiguous()
    return (tensor.view(torch.uint8) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _problems(path: Path, layout: Layout) -> Iterator[str]:
    """Compare byte by byte: gguf's own reader makes an object of every token, more memory than a small draft takes."""
    head = _head(path.with_suffix(".head"), layout)
    with path.open("rb") as file:
        if file.read(len(head)) != head:
            yield "the metadata differ"
            return
        place = len(head)
        for name, wanted in layout.tensors.items():
            place += -place % GGUF_DEFAULT_ALIGNMENT
            file.seek(place)
            if not all(holds(file, piece) for piece in pieces(wanted)):
                yield f"tensor {name} differs"
            place += wanted.nbytes


def _head(scratch: Path, layout: Layout) -> bytes:
    """What stands before the tensors' data: metadata, and the names, types and places of the tensors."""
    writer = _writer(scratch, layout)
    try:
        for name, tensor in layout.tensors.items():
            writer.add_tensor_info(
                name, tuple(tensor.shape), np.dtype(np.float32), tensor.nbytes, raw_dtype=_TYPES[tensor.dtype]
            )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        return scratch.read_bytes()
    finally:
        scratch.unlink(missing_ok=True)


def _writer(path: Path, layout: Layout) -> GGUFWriter:
    """With the metadata, whose first entry is the writer's own."""
    writer = GGUFWriter(path, layout.config[_ARCHITECTURE])
    for key, value in layout.config.items():
        if key != _ARCHITECTURE:
            _add(writer, key, value)
    return writer


def gguf_command(ir: DraftIR, folder: Path, target: str, k: int) -> str:
    """`llama-server`; the target has to be a GGUF file, too."""
    return (
        f"llama-server -m {quote(Path(target).name)}.gguf --model-draft {quote(str(folder / FILE))} "
        f"--spec-type draft-simple --spec-draft-n-max {k}"
    )


GGUF = Engine("gguf", "llama.cpp b9014 and later", gguf_layout, gguf_command, complete, write_gguf)
