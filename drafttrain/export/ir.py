"""The one form of a trained draft that all writers read: what it is, without an engine's names or numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.arch import DraftArch
from drafttrain.drafters.saving import DraftMeta, find_draft, read_draft
from drafttrain.errors import UserError
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap


class ExportError(UserError):
    """A draft that an engine cannot serve, or an export that is not what was meant."""


@dataclass(frozen=True)
class Norms:
    """Where an EAGLE draft norms; `Eagle3Config` explains each switch."""

    before_fc: bool = False
    per_tap: bool = False
    output: bool = False
    before_residual: bool = False


@dataclass(frozen=True)
class DraftIR:
    """A trained draft.

    Attributes:
        family: name in the registry.
        tensors: under the names of the family's state dict, on the CPU; `d2t` and `t2d` are not among them.
        taps: states of the target that it reads, in the order in which it concatenates them.
        vocab_map: which of the target's tokens it can say.
        arch: sizes and rotary parameters; None for a draft LM.
        layers: decoder layers (EAGLE), residual blocks a head (Medusa), blocks (draft LM).
        heads: Medusa heads, else 1.
        norms: switches of EAGLE drafts.
        bias: EAGLE-1's fc, or Medusa's residual blocks, have biases.
        target_head: a copy of the target's output head [V, H], for engines to which a draft must bring it; no part of
            the draft. See `export.target_head`.
        lm_config: the Hugging Face config of a draft LM, in JSON form, else None.
        depth: steps that were trained; more can be drafted with all families but Medusa.
        target: identity of the target, in JSON form.
        provenance: as the run wrote it.
    """

    family: str
    tensors: dict[str, Tensor]
    taps: tuple[Tap, ...]
    vocab_map: VocabMap
    arch: DraftArch | None
    layers: int
    heads: int
    norms: Norms
    lm_config: dict[str, Any] | None
    depth: int
    target: dict[str, Any]
    provenance: dict[str, Any] = field(default_factory=dict)
    bias: bool = False
    target_head: Tensor | None = None

    @property
    def sizes(self) -> DraftArch:
        """`arch` of a family that has one."""
        assert self.arch is not None
        return self.arch

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return next(tensor.dtype for tensor in self.tensors.values() if tensor.is_floating_point())

    @property
    def nbytes(self) -> int:
        """Size of the tensors, that of a copied head included."""
        head = 0 if self.target_head is None else self.target_head.nbytes
        return head + sum(tensor.nbytes for tensor in self.tensors.values())


def read_ir(run: str | Path, dtype: torch.dtype | None = None) -> DraftIR:
    """Read a run's draft or a draft folder. The target is not read.

    Args:
        run: a run's folder (its best draft is taken), or a saved draft.
        dtype: of the weights; default: as stored.

    Raises:
        CheckpointError: no finished draft, or damaged files.
    """
    twin, meta, stored = read_draft(find_draft(run))
    tensors = {
        name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in stored.items()
    }
    vocab_map = VocabMap.full(meta.vocab_size)
    if "d2t" in tensors:
        vocab_map = VocabMap(tensors.pop("d2t"), tensors.pop("t2d"))
    is_lm = meta.family == "draft_lm"
    return DraftIR(
        family=meta.family,
        tensors=tensors,
        taps=twin.feature_spec.taps,
        vocab_map=vocab_map,
        arch=None if is_lm else DraftArch.model_validate(meta.arch),
        layers=int(meta.arch["num_hidden_layers"]) if is_lm else getattr(meta.config, "num_layers", 1),
        heads=meta.config.num_heads if meta.family == "medusa" else 1,
        norms=_norms(meta),
        lm_config=dict(meta.arch) if is_lm else None,
        depth=twin.max_depth,
        target=meta.target,
        provenance=meta.provenance,
        bias=bool(getattr(meta.config, "bias", False) or getattr(meta.config, "fc_bias", False)),
    )


def _norms(meta: DraftMeta) -> Norms:
    config: Mapping[str, Any] = meta.config.model_dump()
    return Norms(
        before_fc=bool(config.get("norm_before_fc")),
        per_tap=bool(config.get("fc_norm")),
        output=bool(config.get("norm_output")),
        before_residual=bool(config.get("norm_before_residual")),
    )
