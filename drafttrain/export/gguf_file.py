"""GGUF files: written tensor by tensor, read back and compared; the engine llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
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
    writer = GGUFWriter(path, layout.config[_ARCHITECTURE])
    try:
        for key, value in layout.config.items():
            if key != _ARCHITECTURE:  # the writer's own
                _add(writer, key, value)
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
    reader = GGUFReader(path)
    for key, value in layout.config.items():
        field = reader.get_field(key)
        found = None if field is None else field.contents()
        if found != (float(np.float32(value)) if isinstance(value, float) else value):
            yield f"field {key} differs"
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name in sorted(set(stored) ^ set(layout.tensors)):
        yield f"tensor {name} is {'extra' if name in stored else 'missing'}"
    with path.open("rb") as file:
        for name, wanted in layout.tensors.items():
            entry = stored.get(name)
            if entry is None:
                continue
            file.seek(int(entry.data_offset))
            shape = tuple(int(size) for size in reversed(entry.shape))
            same = entry.tensor_type == _TYPES[wanted.dtype] and shape == tuple(wanted.shape)
            if not same or not all(holds(file, piece) for piece in pieces(wanted)):
                yield f"tensor {name} differs"


def gguf_command(ir: DraftIR, folder: Path, target: str, k: int) -> str:
    """`llama-server`; the target has to be a GGUF file, too."""
    return (
        f"llama-server -m {quote(Path(target).name)}.gguf --model-draft {quote(str(folder / FILE))} "
        f"--spec-type draft-simple --spec-draft-n-max {k}"
    )


GGUF = Engine("gguf", "llama.cpp b9014 and later", gguf_layout, gguf_command, complete, write_gguf)
