"""The one tensor of a target that an export can hold: the output head, for Medusa drafts that read the target's.

vLLM gives Medusa drafts no access to the target's head: a checkpoint brings it, once for all heads.
"""

from __future__ import annotations

from dataclasses import replace

from drafttrain.errors import TargetError
from drafttrain.export.ir import DraftIR, ExportError
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.identity import weights_fingerprint
from drafttrain.targets.load import weight_files
from drafttrain.targets.stored import read_head

NAME = "lm_heads.0.weight"
"""Under which vLLM reads it, with `original_lm_head: true`."""


def reads_target_head(ir: DraftIR) -> bool:
    """Whether these are Medusa heads without weights of their own."""
    return ir.family == "medusa" and not any(name.startswith("lm_heads.") for name in ir.tensors)


def target_of(ir: DraftIR) -> TargetConfig:
    """What a draft says that it was trained for."""
    return TargetConfig(model=str(ir.target.get("name", "")))


def with_target_head(ir: DraftIR, target: TargetConfig) -> DraftIR:
    """A Medusa draft that reads the target's head, with a copy of it in the draft's dtype; others as they are.

    Only that tensor is read, in pieces, after the files were found to be those of the target trained for.

    Raises:
        ExportError: the head cannot be read, or is that of another target.
    """
    if not reads_target_head(ir):
        return ir
    remedy = f"make {target.model} available here as it was trained for, or train with drafter.head=own"
    try:
        if ir.target.get("weights_hash") != weights_fingerprint(weight_files(target)):
            raise ExportError(
                f"the draft reads the head of {ir.target.get('name')}, and its weight files are not those that it was "
                "trained for",
                where=target.model,
                remedy=remedy,
            )
        head = read_head(target, ir.dtype)
    except (TargetError, OSError) as error:
        why = error.what if isinstance(error, TargetError) else str(error).strip().splitlines()[0]
        raise ExportError(
            f"vllm cannot serve this draft without the target's head (drafter.head target): {why}",
            where=target.model,
            remedy=remedy,
        ) from None
    wanted = (ir.sizes.vocab_size, ir.sizes.target_hidden_size)
    if tuple(head.shape) != wanted:
        raise ExportError(f"its head is {tuple(head.shape)}, the draft reads {wanted}", where=target.model)
    return replace(ir, target_head=head)
