"""Configuration of the EAGLE families."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from drafttrain.config import Config, Place
from drafttrain.drafters.lora_config import LoraConfig


class EagleConfig(Config):
    """What EAGLE-1 and EAGLE-3 share.

    Attributes:
        depth: unrolled steps in training. EAGLE-3's training-time test uses 7; EAGLE-1 above 1 is HASS.
        intermediate_size, num_heads, num_kv_heads: default: the target's.
        init_layer: "random", "target:last" to start the layers from the target's last blocks, or "target:<i>" from
            block i and those behind it (their sizes must fit).
        warm_start: folder of a trained draft to start from.
        lora: train adapters on the draft of `warm_start` alone.
    """

    depth: int = Field(ge=1, le=16)
    intermediate_size: int | None = Field(default=None, ge=1)
    num_heads: int | None = Field(default=None, ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    init_layer: str = "random"
    warm_start: Place | None = None
    lora: LoraConfig | None = None

    @model_validator(mode="after")
    def _adapters_need_a_draft(self) -> Self:
        if self.lora is not None and self.warm_start is None:
            raise ValueError("lora adapts a trained draft: name its folder as warm_start")
        return self

    @field_validator("init_layer")
    @classmethod
    def _known_source(cls, value: str) -> str:
        kind, _, index = value.partition(":")
        if value != "random" and not (kind == "target" and (index.isdigit() or index == "last")):
            raise ValueError(f"{value!r}: use 'random', 'target:last' or 'target:<block>'")
        return value

    def init_blocks(self, n_layers: int, count: int = 1) -> tuple[int, ...]:
        """The blocks that the draft's layers, `count` of them, start from, of a target with `n_layers`; or none."""
        if self.init_layer == "random":
            return ()
        index = self.init_layer.partition(":")[2]
        first = n_layers - count if index == "last" else int(index)
        return tuple(range(first, first + count))


class Eagle3Config(EagleConfig):
    """EAGLE-3 (arXiv 2503.01840) and 3.1 (arXiv 2605.09992).

    Attributes:
        taps: states of the target that are fused; default (2, n//2, n-3) for n blocks, for fewer than 7 three that
            differ.
        draft_vocab_size: tokens the draft can say; None = all of the target's.
        hidden_size: default: the target's.
        norm_before_fc: one RMSNorm over the concatenated taps.
        fc_norm: one RMSNorm for each tap (3.1).
        norm_output: feed the normed state to the next step (3.1). The head reads the normed state in any
            case.
        norm_before_residual: the residual is the normed state instead of the raw one.
        init_head: "target" copies the rows of the target's head and its final norm.
        init_fc: "random", or "last" to start as the copy of the last tap.
        train_head: off leaves the head as it starts, which makes a step cheaper.
        widen_vocab: with `warm_start`, keep the saved draft's vocabulary and add to it what the data says most often,
            up to `draft_vocab_size`; the new rows of the head come from the target's.
    """

    family: Literal["eagle3"] = "eagle3"
    taps: tuple[int | str, ...] | None = None
    draft_vocab_size: int | None = Field(default=None, ge=2)
    depth: int = Field(default=7, ge=1, le=16)
    num_layers: int = Field(default=1, ge=1, le=8)
    hidden_size: int | None = Field(default=None, ge=2)
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    init_head: Literal["target", "random"] = "target"
    init_fc: Literal["random", "last"] = "random"
    train_head: bool = True
    widen_vocab: bool = False

    @model_validator(mode="after")
    def _something_to_widen(self) -> Eagle3Config:
        if self.widen_vocab and (self.warm_start is None or self.draft_vocab_size is None):
            raise ValueError("widen_vocab needs warm_start (the draft to widen) and draft_vocab_size (how far)")
        return self

    @model_validator(mode="after")
    def _head_worth_keeping(self) -> Eagle3Config:
        if not self.train_head and self.init_head == "random" and self.warm_start is None:
            raise ValueError("train_head: false would keep a random head: set init_head: target")
        return self

    @model_validator(mode="after")
    def _one_norm(self) -> Eagle3Config:
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("norm_before_fc and fc_norm exclude each other: choose one")
        if self.taps is not None and not self.taps:
            raise ValueError("taps is empty: EAGLE-3 needs at least one")
        return self

    def taps_for(self, n_layers: int) -> tuple[int | str, ...]:
        """The taps for a target of `n_layers` blocks."""
        if self.taps is not None:
            return self.taps
        if n_layers >= 7:
            return (2, n_layers // 2, n_layers - 3)
        # Those of a smaller target would repeat, which no serving engine takes: they are spread over what there is.
        if n_layers >= 3:
            return (n_layers // 4, n_layers // 2, n_layers - 1)
        return (*range(n_layers), "pre_norm", "final")[:3]


class Eagle1Config(EagleConfig):
    """EAGLE-1 (arXiv 2401.15077); EAGLE-2 drafts trees from the same weights; depth > 1 is HASS (arXiv
    2408.15766).

    Attributes:
        feature_noise: uniform noise in +-this on the target's features while training.
        detach: HASS's aligned steps read the draft's own features without a gradient through them.
        fc_bias: fc has a bias, as in most of the paper's own checkpoints. vLLM has none.
        init_fc: "random", or "feature" to start as the copy of the feature.
    """

    family: Literal["eagle1"] = "eagle1"
    depth: int = Field(default=1, ge=1, le=16)
    feature_noise: float = Field(default=0.1, ge=0.0)
    detach: bool = True
    fc_bias: bool = False
    init_fc: Literal["random", "feature"] = "random"
