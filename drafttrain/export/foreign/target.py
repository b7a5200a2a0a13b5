"""What an importer knows of the target: its config and identity, and single tensors where it must compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from drafttrain.drafters.arch import DraftArch
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import load_identity, load_text_config
from drafttrain.targets.stored import equals_stored, head_names


@dataclass(frozen=True)
class Target:
    """A target that is not loaded."""

    config: TargetConfig

    @cached_property
    def text(self) -> Any:
        """Its Hugging Face text config."""
        return load_text_config(self.config)

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Its identity in JSON form; it needs a tokenizer."""
        return load_identity(self.config).to_dict()

    @cached_property
    def arch(self) -> DraftArch:
        """Its sizes."""
        return DraftArch.from_target(self.text)

    def has_head(self, tensor: Tensor) -> bool | None:
        """Whether this is its output head; None where that cannot be told."""
        return self.stores(head_names(self.config), tensor)

    def stores(self, names: Sequence[str], tensor: Tensor) -> bool | None:
        """Whether it holds this very tensor under one of the names; None where that cannot be told."""
        return equals_stored(self.config, names, tensor)
