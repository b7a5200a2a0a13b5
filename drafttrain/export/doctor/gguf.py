"""A draft LM in a GGUF file, as the causal LM that it holds: then the rules and the trial for draft LMs apply."""

from __future__ import annotations

from pathlib import Path

from drafttrain.export.doctor.draft import CONFIG, RawDraft
from drafttrain.export.doctor.weights import WeightFiles
from drafttrain.export.foreign.checkpoint import read_checkpoint
from drafttrain.export.foreign.detect import GGUF, detect
from drafttrain.export.foreign.gguf_read import read_gguf
from drafttrain.export.foreign.target import Target
from drafttrain.export.hf import lm_layout
from drafttrain.targets.config import TargetConfig

ENGINE = "llama.cpp"


def holds_gguf(folder: str | Path) -> bool:
    """Whether a folder's draft is a GGUF file."""
    path = Path(folder)
    return path.is_dir() and not (path / CONFIG).exists() and any(path.glob("*.gguf"))


def open_gguf(folder: str | Path, target: TargetConfig) -> RawDraft:
    """The LM under transformers' names, all of it in memory.

    Args:
        target: that it is to draft for. Its tokens are compared with those in the file.

    Raises:
        CheckpointError: a damaged or quantised file, an architecture that is not known, tokens that are not the
            target's; with what to do.
        TargetError: the target's config or tokenizer cannot be found.
    """
    checkpoint = read_checkpoint(folder)
    detect(checkpoint, GGUF)
    ir, _ = read_gguf(checkpoint, Target(target))
    layout = lm_layout(ir)
    return RawDraft(Path(folder), layout.config, WeightFiles({}, ()), changed=layout.tensors)
