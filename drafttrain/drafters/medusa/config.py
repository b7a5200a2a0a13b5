"""Configuration of Medusa heads."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from drafttrain.config import Config, Place


class MedusaConfig(Config):
    """Medusa-1 (arXiv 2401.10774): the target stays frozen.

    Attributes:
        num_heads: head i (from 0) predicts x_{t+2+i} from f_t.
        num_layers: residual blocks before each head.
        head: "own": a trained head for each; "target": all read the frozen head of the target, which saves
            num_heads * V * H parameters (`original_lm_head` in vLLM).
        init_head: where own heads start.
        bias: the residual blocks have biases, as the paper's own checkpoints have.
        warm_start: folder of a trained draft to start from.
    """

    family: Literal["medusa"] = "medusa"
    num_heads: int = Field(default=5, ge=1, le=16)
    num_layers: int = Field(default=1, ge=1, le=8)
    head: Literal["own", "target"] = "own"
    init_head: Literal["target", "random"] = "target"
    bias: bool = False
    warm_start: Place | None = None
    lora: ClassVar[None] = None
    """No key of this family."""
