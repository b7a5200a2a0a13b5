"""A causal LM as draft."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import DepthOutput, DraftBatch, DraftCache, Drafter, DraftInputs, DraftOutput
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.lm.hf import (
    copy_blocks,
    copy_checkpoint,
    draft_text_config,
    new_model,
    text_config_from,
)
from drafttrain.drafters.lm.packed import PackedRows
from drafttrain.modeling.causal_lm import CausalLM, CausalLMOutput
from drafttrain.modeling.head import Head
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import FeatureSpec
from drafttrain.modeling.vocab_map import VocabMap

_PREFIX = "lm.hf."


class DraftLM(Drafter):
    """Reads tokens alone; slot t holds x_t and predicts x_{t+1}.

    State dict: that of the wrapped Hugging Face model behind `lm.hf.`, which `saved_names` takes off.
    """

    family = "draft_lm"
    config: DraftLMConfig

    def __init__(self, config: DraftLMConfig, hf: Any, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.lm = CausalLM(hf)
        self._recompute = False
        if self.lm.vocab_size != vocab_size:
            raise ValueError(
                f"the draft has {self.lm.vocab_size} tokens, the target {vocab_size}: they must be the same"
            )
        self.feature_spec = FeatureSpec()
        self.vocab_map = VocabMap.full(vocab_size)
        self.max_depth = 1
        if not config.train_embedding:
            for weight in (self.lm.embedding_weight, self.lm.head().weight):
                weight.requires_grad_(False)

    @classmethod
    def from_text_config(
        cls, config: DraftLMConfig, text: Any, vocab_map: VocabMap | None, device: torch.device | str | None
    ) -> DraftLM:
        """Build with fresh weights; `init_from_target` fills in the target's blocks or the checkpoint's."""
        if vocab_map is not None and not vocab_map.is_full:
            raise ValueError("a draft LM has the target's vocabulary: a smaller one is not possible")
        return cls(config, new_model(draft_text_config(config, text), device), text.vocab_size)

    @classmethod
    def from_saved(
        cls,
        config: DraftLMConfig,
        arch: dict[str, Any],
        vocab_map: VocabMap,
        device: torch.device | str | None,
    ) -> DraftLM:
        """Build from the saved Hugging Face config."""
        return cls(config, new_model(text_config_from(arch), device), vocab_map.vocab_size)

    def saved_arch(self) -> dict[str, Any]:
        """The Hugging Face config, as JSON."""
        arch: dict[str, Any] = json.loads(self.lm.config.to_json_string(use_diff=False))
        return arch

    def init_from_target(self, target: CausalLM) -> None:
        """Chosen blocks of the target, or the checkpoint's weights; nothing for a draft from scratch."""
        if self.config.init == "target_layers":
            copy_blocks(self.lm, target, self.config.layers_for(target.n_layers))
        elif self.config.init == "checkpoint":
            copy_checkpoint(self.lm, str(self.config.checkpoint))

    def check_start(self, target: CausalLM) -> None:
        """See `Drafter.check_start`."""
        if self.config.init == "target_layers":
            self.init_from_target(target)

    def head(self, depth: int) -> Head:
        """The draft's own head."""
        return self.lm.head()

    @property
    def gradient_checkpointing(self) -> bool:
        """Recompute activations in the backward pass."""
        return self._recompute

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, on: bool) -> None:
        self._recompute = on
        hf = self.lm.hf
        # transformers 5.2x renamed the switch.
        new = hasattr(hf, "activation_checkpointing_enable")
        switch = f"{'activation' if new else 'gradient'}_checkpointing_{'enable' if on else 'disable'}"
        getattr(hf, switch)(*([{"use_reentrant": False}] if on else []))

    def new_cache(self, rows: int, length: int) -> StaticKVCache:
        """A serving cache for `rows` rows of up to `length` tokens."""
        return self.lm.new_cache(rows, length)

    def _run(self, tokens: Tensor, positions: Tensor, cache: StaticKVCache | PackedRows) -> Tensor:
        output: CausalLMOutput = self.lm(tokens, positions, cache)
        return output.final

    def prepare_for_inference(self) -> None:
        """Lay the weights out for decoding; they must not change any more."""
        self.eval()
        self.lm.prepare_for_inference()

    def compile_training(self) -> None:
        """MLPs and norms."""
        self.lm.compile_forward()

    def step(self, inputs: DraftInputs, cache: DraftCache) -> DraftOutput:
        """Tokens [B, T] at their positions; `cache` is a `StaticKVCache` after `begin`."""
        assert isinstance(cache, StaticKVCache)
        return DraftOutput(hidden=None, readout=self._run(inputs.tokens, inputs.positions, cache))

    def unroll(self, batch: DraftBatch, depths: int) -> list[DepthOutput]:
        """One forward over the packed rows; a language model has one depth, at offset 1."""
        rows = PackedRows(batch.segments, batch.positions)
        return [DepthOutput(0, 1, self._run(batch.tokens, batch.positions, rows))]

    @staticmethod
    def saved_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Names of an ordinary Hugging Face checkpoint."""
        return {name.removeprefix(_PREFIX): tensor for name, tensor in state.items()}

    @staticmethod
    def loaded_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `saved_names`."""
        return {_PREFIX + name: tensor for name, tensor in state.items()}
