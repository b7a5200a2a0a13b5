"""Configuration of a draft language model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from drafttrain.config import Config, Place
from drafttrain.drafters.lora_config import LoraConfig


class DraftLMConfig(Config):
    """A causal LM as draft (arXiv 2211.17192), trained on the target's answers (DistillSpec, arXiv
    2310.08461).

    Attributes:
        init: "target_layers": chosen blocks of the target with its embedding, norm and head; "checkpoint":
            another model with the target's tokenizer; "scratch": the target's architecture with the sizes
            below, random.
        layers: for target_layers, blocks from 0 in ascending order; default: four spread over the target.
        checkpoint: folder or hub name, for init "checkpoint".
        hidden_size, intermediate_size, num_heads, num_kv_heads, num_layers: for init "scratch".
        train_embedding: whether embedding and head are trained, too.
        warm_start: folder of a trained draft to start from.
        lora: train adapters alone, on what `init` or `warm_start` gives.
    """

    family: Literal["draft_lm"] = "draft_lm"
    init: Literal["target_layers", "checkpoint", "scratch"] = "target_layers"
    layers: tuple[int, ...] | None = None
    checkpoint: str | None = None
    hidden_size: int | None = Field(default=None, ge=2)
    intermediate_size: int | None = Field(default=None, ge=1)
    num_heads: int | None = Field(default=None, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    num_layers: int | None = Field(default=None, ge=1)
    train_embedding: bool = True
    warm_start: Place | None = None
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _consistent(self) -> DraftLMConfig:
        problems = []
        sizes = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "num_layers")
        if self.init == "checkpoint" and not self.checkpoint:
            problems.append("init 'checkpoint' needs the key checkpoint")
        if self.init != "checkpoint" and self.checkpoint:
            problems.append(f"checkpoint has no meaning with init {self.init!r}")
        if self.init != "target_layers" and self.layers is not None:
            problems.append(f"layers has no meaning with init {self.init!r}")
        if self.layers is not None and (not self.layers or list(self.layers) != sorted(set(self.layers))):
            problems.append(f"layers {list(self.layers)} must be distinct blocks in ascending order")
        given = [name for name in sizes if getattr(self, name) is not None]
        if self.init != "scratch" and given:
            problems.append(f"{', '.join(given)} has no meaning with init {self.init!r}")
        if self.init == "scratch" and self.num_layers is None:
            problems.append("init 'scratch' needs num_layers")
        if self.lora is not None and self.init == "scratch" and self.warm_start is None:
            problems.append("lora adapts a trained model: init 'scratch' is none")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def layers_for(self, n_layers: int) -> tuple[int, ...]:
        """The target's blocks that are taken; by default four, the first, the last and two between."""
        if self.layers is not None:
            return self.layers
        count = min(4, n_layers)
        return tuple(round(i * (n_layers - 1) / max(count - 1, 1)) for i in range(count))
